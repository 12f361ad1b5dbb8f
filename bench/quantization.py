"""What quantised weights cost and save: `python -m bench.quantization [--model PATH] [--threads N] [--cpu-time]`.

For bfloat16 and each `--quantization`: bytes of the weights, step times, perplexity of a page of prose (the start of
Alice in Wonderland), and how far greedy continuations of its parts agree with bfloat16's. A table on stderr, JSON on
stdout.

The bundled model is a Q4_1 file, and bfloat16 here is that file dequantised: int4 finds nearly the same codes again, so
its loss there says little about int4 of a float checkpoint. The logit error of a random model, whose weights were never
rounded before, has no such help; but it is no measure of what a trained model loses.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.kernels import SMOLLM2, Clock
from services.worker import loader
from services.worker.executor import Ints, StepBatch
from services.worker.models import decoder_spec
from services.worker.native import NativeExecutor
from services.worker.quantize import formats
from services.worker.spec import DecoderSpec
from shared.config import EngineConfig
from shared.model_config import is_gguf, read_config
from shared.model_info import read_model_info

TEXT = Path(__file__).with_name("alice.txt")
PROMPTS, PROMPT, CONTINUATION = 20, 24, 64  # continuations, tokens of a prompt and of a continuation
STEPS = {"1 row": (1, 1), "32 rows": (32, 1), "prompt of 256": (1, 256)}  # sequences, rows of each
BLOCK = 16


@dataclass
class Measured:
    """One quantization. Times in seconds; the shares are of tokens."""

    quantization: str
    weight_bytes: int
    perplexity: float
    same_next: float  # positions of the text where the likeliest next token is bfloat16's
    agreement: float  # of the continuations, up to the first difference
    logit_error: float  # of a random model, rms, relative to the logits' spread
    steps: dict[str, float]


def rows_of(sequences: Sequence[Ints], done: Sequence[int], width: int, wanted: Sequence[int]) -> StepBatch:
    """The tokens of each sequence that are not done yet, sequence i in blocks i * width and so on."""
    counts = [len(s) - d for s, d in zip(sequences, done, strict=True)]
    return StepBatch(
        tokens=np.concatenate([s[d:] for s, d in zip(sequences, done, strict=True)]).astype(np.int32),
        positions=np.concatenate([np.arange(d, len(s)) for s, d in zip(sequences, done, strict=True)]).astype(np.int32),
        query_start=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        context_lens=np.array([len(s) for s in sequences], np.int32),
        block_tables=np.arange(len(sequences) * width, dtype=np.int32).reshape(-1, width),
        logit_rows=np.array(wanted, np.int32),
    )


def logits_of(executor: NativeExecutor, ids: Ints) -> NDArray[np.float32]:
    """Logits after each id, [len(ids), vocab]."""
    return executor.forward(rows_of([ids], [0], -(-len(ids) // BLOCK), range(len(ids)))).copy()


def perplexity(logits: NDArray[np.float32], ids: Ints) -> float:
    wide = logits[:-1].astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    chosen = wide[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(wide).sum(axis=1))
    return float(np.exp(-chosen.mean()))


def continuations(executor: NativeExecutor, ids: Ints) -> NDArray[np.int32]:
    """Greedy continuations of parts of the text, in one batch, [PROMPTS, CONTINUATION]."""
    starts = np.linspace(0, len(ids) - PROMPT, PROMPTS).astype(int)
    sequences = [ids[start : start + PROMPT] for start in starts]
    width, done = -(-(PROMPT + CONTINUATION) // BLOCK), [0] * PROMPTS
    for _ in range(CONTINUATION):
        ends = np.cumsum([len(s) - d for s, d in zip(sequences, done, strict=True)]) - 1
        best = executor.forward(rows_of(sequences, done, width, ends.tolist())).argmax(axis=1)
        done = [len(s) for s in sequences]
        sequences = [np.append(s, np.int32(token)) for s, token in zip(sequences, best, strict=True)]
    return np.array([s[PROMPT:] for s in sequences], np.int32)


def agreement(found: NDArray[np.int32], base: NDArray[np.int32]) -> float:
    """Share of the tokens before each continuation's first difference."""
    return float(np.logical_and.accumulate(found == base, axis=1).mean())


def step_times(executor: NativeExecutor, clock: Clock) -> dict[str, float]:
    times, context = {}, 256
    for name, (sequences, rows) in STEPS.items():
        ids = [np.arange(context, dtype=np.int32)] * sequences
        ends = range(rows - 1, sequences * rows, rows)
        batch = rows_of(ids, [context - rows] * sequences, context // BLOCK, list(ends))
        times[name] = clock.best(lambda b=batch: executor.forward(b))
    return times


def random_logits(quantization: str, threads: int) -> NDArray[np.float32]:
    """Of a model of the bundled one's widths with few layers, whose weights are random and were never rounded."""
    spec = dataclasses.replace(SMOLLM2, num_layers=4, windows=(0,) * 4, vocab_size=4096)
    executor = made(spec, quantization, threads)
    rng = np.random.default_rng(0)

    def weight(shape: tuple[int, ...]) -> NDArray[np.float32]:
        values = rng.standard_normal(shape, dtype=np.float32)
        return 1 + np.float32(0.1) * values if len(shape) == 1 else values * np.float32(shape[1] ** -0.5)

    executor.load((name, weight(shape)) for name, shape in spec.weight_shapes().items())
    executor.allocate_kv(8)
    return logits_of(executor, rng.integers(0, 4096, 128).astype(np.int32))


def made(spec: DecoderSpec, quantization: str, threads: int, path: Path | None = None) -> NativeExecutor:
    chosen = loader.weight_formats(path, spec, quantization) if path else formats(spec, quantization)
    return NativeExecutor(spec, "bfloat16", BLOCK, threads, formats=chosen)


def measure(model: str, quantizations: Sequence[str], threads: int, clock: Clock) -> list[Measured]:
    """Of each quantization; the first is what the others are compared with."""
    info = read_model_info(EngineConfig(model=model))
    path = Path(info.path)
    spec = decoder_spec(read_config(path), min(info.max_model_len, 2048))
    ids = encoded(path)
    results: list[Measured] = []
    for quantization in quantizations:
        executor = made(spec, quantization, threads, path)
        executor.load(loader.weights(path, spec, threads))
        executor.allocate_kv(32 * 256 // BLOCK)
        logits, continued = logits_of(executor, ids), continuations(executor, ids)
        # gguf's formats are Q4_1's and Q8_0's: what they do to floats is what int4 does
        noise = random_logits("int4" if quantization == "gguf" else quantization, threads)
        if not results:
            base_logits, base_continued, base_noise = logits, continued, noise
        results.append(
            Measured(
                quantization,
                executor.weight_bytes(),
                perplexity(logits, ids),
                float((logits.argmax(axis=1) == base_logits.argmax(axis=1)).mean()),
                agreement(continued, base_continued),
                float(np.sqrt(((noise - base_noise) ** 2).mean()) / base_noise.std()),
                step_times(executor, clock),
            )
        )
        say(line_of(results[-1], results[0]))
    return results


def encoded(path: Path) -> Ints:
    """The text in the model's tokens."""
    from services.tokenizer.loading import load

    return np.array(load(path).encoder.encode([TEXT.read_text(encoding="utf-8")], False)[0], np.int32)


HEADER = (
    f"{'':10}{'weights MB':>11}{'perplexity':>12}{'same next':>11}{'agreement':>11}{'logit error':>13}"
    + "".join(f"{name:>22}" for name in STEPS)
)  # fmt: skip


def line_of(m: Measured, base: Measured) -> str:
    name = "bfloat16" if m.quantization == "none" else m.quantization
    times = "".join(f"{m.steps[s] * 1e3:13.1f} ms {base.steps[s] / m.steps[s]:4.2f}x" for s in STEPS)
    return (
        f"{name:10}{m.weight_bytes / 1e6:11.1f}{m.perplexity:12.3f}{m.same_next:11.1%}{m.agreement:11.1%}"
        f"{m.logit_error:13.4f}{times}"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="as for pagebus serve; without one, the bundled model")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cpu-time", action="store_true", help="on a busy machine, with --threads 1")
    args = parser.parse_args(argv)
    chosen = ["none", "int8", "int4", "w8a8"]
    if is_gguf(Path(read_model_info(EngineConfig(model=args.model)).path)):
        chosen.append("gguf")
    say(HEADER)
    results = measure(args.model, chosen, args.threads, Clock(args.cpu_time))
    result: dict[str, Any] = {"threads": args.threads, "base": "bfloat16", "lines": [vars(m) for m in results]}
    print(json.dumps(result))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
