"""Runs a model without a scheduler: a runner, a free list of blocks, and prompts in chunks of a fixed size."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from services.worker import loader
from services.worker.backends import make_executor, native_unavailable
from services.worker.executor import Executor, StepBatch
from services.worker.models.families import decoder_spec
from services.worker.runner import Runner
from shared.config import EngineConfig
from shared.messages import Admit, Plan, pack_ids
from shared.model_config import read_config
from shared.model_info import ModelInfo, read_model_info
from shared.sampling import SamplingParams

BACKENDS = ["reference"] if native_unavailable() else ["reference", "cpu"]
NUM_BLOCKS = 512
BLOCK_SIZE = 16


@dataclass
class Served:
    """A loaded model."""

    executor: Executor
    info: ModelInfo
    config: EngineConfig

    def driver(self, seed: int | None = None) -> Driver:
        """A driver with empty slots."""
        return Driver(Runner(self.executor, self.info, self.config), NUM_BLOCKS, seed)


def serve(path: Path, backend: str, dtype: str = "float32", quantization: str = "none") -> Served:
    """Loads the model at `path` and allocates NUM_BLOCKS blocks."""
    config = EngineConfig(
        model=str(path), backend=backend, dtype=dtype, quantization=quantization, block_size=BLOCK_SIZE, threads=1
    )  # type: ignore[arg-type]
    info = read_model_info(config)
    spec = decoder_spec(read_config(path), info.max_model_len)
    executor = make_executor(spec, config, info, loader.weight_formats(path, spec, quantization))
    executor.load(loader.weights(path, spec))
    executor.allocate_kv(NUM_BLOCKS)
    return Served(executor, info, config)


@dataclass
class _Sequence:
    tokens: list[int]
    params: SamplingParams
    computed: int = 0
    table: list[int] = field(default_factory=list)


class Driver:
    """Drives a runner as the scheduler does. With a seed, blocks are handed out in random order."""

    def __init__(self, runner: Runner, num_blocks: int, seed: int | None = None) -> None:
        self._runner = runner
        self._free = list(range(num_blocks))
        self._random = random.Random(seed)
        self._shuffled = seed is not None
        self._steps = 0

    def generate(
        self, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams], chunk: int = 1 << 20
    ) -> list[list[int]]:
        """Output ids of all prompts, run together, `chunk` tokens of a prompt at a time; ends at max_tokens alone."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        running = {i: _Sequence(list(p), q) for i, (p, q) in enumerate(zip(prompts, each, strict=True))}
        outputs: list[list[int]] = [[] for _ in prompts]
        admits = [Admit(i, pack_ids(s.tokens), len(s.tokens), s.params) for i, s in running.items()]
        release: list[int] = []
        while running or release:
            plan = self._plan(running, chunk, release, admits)
            tokens = iter(self._runner.run(plan).tokens)
            release, admits = [], []
            for slot, sampled in zip(plan.slots, plan.samples, strict=True):
                if sampled:
                    running[slot].tokens.append(next(tokens))
                    outputs[slot].append(running[slot].tokens[-1])
                    if len(outputs[slot]) == running[slot].params.max_tokens:
                        self._free += running.pop(slot).table
                        release.append(slot)
        return outputs

    def _plan(self, running: dict[int, _Sequence], chunk: int, release: list[int], admits: list[Admit]) -> Plan:
        self._steps += 1
        plan = Plan(1, self._steps, release, [], admits, [], [], [], [], [])
        for slot, sequence in running.items():
            count = min(chunk, len(sequence.tokens) - sequence.computed)
            end = sequence.computed + count
            fresh = [self._block() for _ in range(-(-end // BLOCK_SIZE) - len(sequence.table))]
            plan.slots.append(slot)
            plan.starts.append(sequence.computed)
            plan.counts.append(count)
            plan.samples.append(int(end == len(sequence.tokens)))
            plan.blocks.append(fresh)
            sequence.table += fresh
            sequence.computed = end
        return plan

    def _block(self) -> int:
        return self._free.pop(self._random.randrange(len(self._free)) if self._shuffled else 0)


def all_logits(executor: Executor, ids: list[int], chunk: int = 1 << 20, seed: int = 0) -> torch.Tensor:
    """Logits at every position of one sequence, [len(ids), vocab], over blocks in random order."""
    blocks = random.Random(seed).sample(range(NUM_BLOCKS), -(-len(ids) // BLOCK_SIZE))
    parts = []
    for start in range(0, len(ids), chunk):
        part = np.array(ids[start : start + chunk], np.int32)
        n = len(part)
        step = StepBatch(
            tokens=part,
            positions=np.arange(start, start + n, dtype=np.int32),
            query_start=np.array([0, n], np.int32),
            context_lens=np.array([start + n], np.int32),
            block_tables=np.array([blocks], np.int32),
            logit_rows=np.arange(n, dtype=np.int32),
        )
        parts.append(torch.from_numpy(executor.forward(step).copy()))
    return torch.cat(parts)


def assert_close(logits: torch.Tensor, oracle: torch.Tensor) -> None:
    """Logits equal the oracle's within 1e-4, in units of their spread where that is above 1.

    transformers' own float32 logits of SmolLM2, which spread by 6, are 0.9e-4 off those in float64.
    """
    error = (logits - oracle).abs().max().item()
    assert error < 1e-4 * max(1.0, oracle.std().item()), f"{len(logits)} tokens: {error}"


def assert_greedy(oracle: torch.Tensor, prompt: list[int], output: list[int], margin: float = 1e-3) -> None:
    """Each output id is the best one of the oracle's logits (of prompt + output), or as good within `margin`."""
    scores = oracle[len(prompt) - 1 : len(prompt) + len(output) - 1]
    chosen = scores.gather(1, torch.tensor(output)[:, None])[:, 0]
    behind = scores.max(dim=1).values - chosen
    assert behind.max() < margin, f"output {output}: behind the best by {behind.tolist()}"
