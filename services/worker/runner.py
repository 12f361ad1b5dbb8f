"""The worker without its bus: plans in, results out."""

from __future__ import annotations

import time

import numpy as np

from services.worker.batch import Batch
from services.worker.executor import Executor, StepBatch
from services.worker.sampler import sample
from shared.config import EngineConfig
from shared.messages import Plan, Result
from shared.model_info import ModelInfo

WARM_UP_TOKENS = 64


class Runner:
    """Runs plans, in order, on an executor whose weights are loaded and whose KV cache is allocated."""

    def __init__(self, executor: Executor, info: ModelInfo, config: EngineConfig) -> None:
        self.executor = executor
        self._config = config
        self._batch = Batch(config.block_size, info.eos_token_ids)

    def run(self, plan: Plan) -> Result:
        """Runs one step. A token of -1 in the result: that row's logits are not numbers. Raises PlanError."""
        began = time.perf_counter()
        if plan.copies:
            self.executor.copy_blocks(list(zip(plan.copies[::2], plan.copies[1::2], strict=True)))
        step = self._batch.apply(plan)
        tokens: list[int] = []
        if step is not None:
            logits = self.executor.forward(step)
            if len(step.logit_rows):
                tokens = sample(logits, self._batch.sampling_rows(plan))
                self._batch.append(plan, tokens)
        return Result(plan.epoch, plan.step, tokens, time.perf_counter() - began)

    def reset(self) -> None:
        """Frees all slots; what the KV cache holds no longer counts."""
        self._batch.clear()

    def warm_up(self, num_blocks: int) -> float:
        """Runs a short prefill and a decode step over the first of `num_blocks` blocks; returns seconds.

        The first step pays for threads, kernels and pages that later ones find ready.
        """
        began = time.perf_counter()
        block_size = self._config.block_size
        blocks = min(num_blocks, -(-WARM_UP_TOKENS // block_size))
        length = min(blocks * block_size, WARM_UP_TOKENS)
        if length > 1:
            self.executor.forward(_warm_up_step(0, length - 1, blocks))
        self.executor.forward(_warm_up_step(length - 1, 1, blocks))
        return time.perf_counter() - began


def _warm_up_step(start: int, count: int, blocks: int) -> StepBatch:
    """`count` rows of one sequence from position `start`."""
    return StepBatch(
        tokens=np.zeros(count, np.int32),
        positions=np.arange(start, start + count, dtype=np.int32),
        query_start=np.array([0, count], np.int32),
        context_lens=np.array([start + count], np.int32),
        block_tables=np.arange(blocks, dtype=np.int32)[None],
        logit_rows=np.array([count - 1], np.int32),
    )
