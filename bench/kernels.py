"""What the native kernels reach of this machine's limits: `python -m bench.kernels [--dtype bfloat16] [--threads N]`.

Prints the read bandwidth and the rate of multiply-adds measured in the same run, then matrix products, attention and
whole steps of a model's shape (SmolLM2-135M, or Llama-3.2-1B with `--shape 1b`) as shares of what those limits allow.
A table on stderr, JSON on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from services.worker import _cpu
from services.worker.executor import StepBatch
from services.worker.native import NativeExecutor
from services.worker.spec import DecoderSpec, RopeSpec

GEMM_ROWS = (1, 2, 4, 8, 16, 32, 96, 256)
CONTEXTS = (1024, 4096)
STEPS = ((1, 128), (8, 128), (32, 320), (256, 256))  # sequences or, for the last, rows of one prompt; context
INV_FREQ = tuple(float(np.float32(100000.0 ** (-i / 32))) for i in range(32))
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CODES = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.uint16}

SMOLLM2 = DecoderSpec(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    norm_eps=1e-5,
    rope=RopeSpec(64, INV_FREQ),
    windows=(0,) * 30,
    attention_scale=0.125,
    max_position=8192,
    tie_embeddings=True,
)
LLAMA_1B = replace(
    SMOLLM2,
    vocab_size=128256,
    hidden_size=2048,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    intermediate_size=8192,
    windows=(0,) * 16,
)


@dataclass
class Limits:
    """Of this machine with these threads: bytes/s read, floating-point operations/s."""

    bandwidth: float
    peak: float


@dataclass
class Line:
    """One measurement: how long it took and how long the slower of both limits says it must take."""

    name: str
    seconds: float
    bytes: float
    flops: float

    def share(self, limits: Limits) -> float:
        return max(self.bytes / limits.bandwidth, self.flops / limits.peak) / self.seconds


class Clock:
    """Wall time; or with one thread, on a busy machine, the time this process has had."""

    SECONDS = 0.8  # for the runs of one measurement

    def __init__(self, cpu: bool) -> None:
        self.now = time.process_time if cpu else time.perf_counter

    def best(self, run: Callable[[], object]) -> float:
        """The shortest of some runs: other processes only ever add time."""
        run()
        end = time.perf_counter() + self.SECONDS
        times: list[float] = []
        while time.perf_counter() < end or len(times) < 3:
            start = self.now()
            run()
            times.append(self.now() - start)
        return min(times)


def shape(name: str) -> DecoderSpec:
    return {"smollm2": SMOLLM2, "1b": LLAMA_1B}[name]


def measure_limits(ops: Any, dtype: str, clock: Clock) -> Limits:
    data = np.ones((64, 1 << 20), np.float32)  # 256 MiB
    bandwidth = ops.probe_read(data) / clock.best(lambda: ops.probe_read(data))
    return Limits(bandwidth, ops.probe_fma(100_000, dtype) / clock.best(lambda: ops.probe_fma(100_000, dtype)))


def gemm_lines(spec: DecoderSpec, ops: Any, dtype: str, clock: Clock) -> Iterator[Line]:
    """The matrices of all layers one after another, so that no cache holds them."""
    rng = np.random.default_rng(0)
    h, q, kv = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    ff = spec.intermediate_size
    shapes = [(q + 2 * kv, h, False), (h, q, False), (2 * ff, h, True), (h, ff, False)]
    bits = {(n, k): native_bits(rng.standard_normal((n, k), dtype=np.float32), dtype) for n, k, _ in shapes}
    layers = [
        [ops.pack(bits[n, k].view(CODES[dtype]), dtype, dtype, gated=gated) for n, k, gated in shapes]
        for _ in range(spec.num_layers)
    ]
    weights = spec.num_layers * sum(n * k for n, k, _ in shapes)
    for rows in GEMM_ROWS:
        x = [rng.standard_normal((rows, k), dtype=np.float32) for _, k, _ in shapes]
        y = [np.zeros((rows, n // 2 if gated else n), np.float32) for n, _, gated in shapes]

        def run(x: list[Any] = x, y: list[Any] = y) -> None:
            for layer in layers:
                for w, a, b in zip(layer, x, y, strict=True):
                    ops.gemm(w, a, b)

        yield Line(f"gemm, {rows} rows", clock.best(run), weights * BYTES[dtype], 2 * rows * weights)


def native_bits(values: Any, dtype: str) -> Any:
    """float32 values as the executor takes them; bfloat16 cut off, not rounded."""
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def attention_lines(spec: DecoderSpec, ops: Any, dtype: str, clock: Clock) -> Iterator[Line]:
    """Decode of one sequence and a prefill chunk of 256 rows, over the caches of all layers in turn."""
    heads, kv_heads, dim, rng = spec.num_heads, spec.num_kv_heads, spec.head_dim, np.random.default_rng(0)
    for context in CONTEXTS:
        blocks = context // 16
        layers = [
            _cpu.AttentionLayer(ops, dtype, heads, kv_heads, dim, 16, blocks, 0, list(INV_FREQ), 1.0)
            for _ in range(spec.num_layers)
        ]
        table = rng.permutation(blocks).astype(np.int32)[None]

        def run(rows: int, end: int, layers: list[Any] = layers, table: Any = table) -> None:
            qkv = rng.standard_normal((rows, (heads + 2 * kv_heads) * dim), dtype=np.float32)
            out = np.empty((rows, heads * dim), np.float32)
            positions, starts = np.arange(end - rows, end, dtype=np.int32), np.array([0, rows], np.int32)
            for layer in layers:
                layer.run(qkv, positions, starts, np.array([end], np.int32), table, 0.125, out)

        for end in range(256, context + 1, 256):
            run(256, end)
        for rows in (1, 256):
            pairs = sum(range(context - rows + 1, context + 1)) * heads * len(layers)
            seconds = clock.best(lambda r=rows, c=context: run(r, c))
            read = 2 * context * kv_heads * dim * BYTES[dtype] * len(layers)
            yield Line(f"attention, {rows} rows at {context}", seconds, read, 4 * dim * pairs)


def step_lines(spec: DecoderSpec, dtype: str, threads: int, isa: str, clock: Clock) -> Iterator[Line]:
    """Whole steps of a model with random weights: embedding to logits."""
    runner = NativeExecutor(spec, dtype, 16, threads, isa)  # type: ignore[arg-type]
    values = np.random.default_rng(0).standard_normal(spec.vocab_size * spec.hidden_size, dtype=np.float32) * 0.05
    bits = native_bits(values.astype(np.float32), dtype)
    runner.load((name, bits[: int(np.prod(shape))].reshape(shape)) for name, shape in spec.weight_shapes().items())
    runner.allocate_kv(1024)
    head = spec.vocab_size * spec.hidden_size
    layers = sum(int(np.prod(s)) for s in spec.weight_shapes().values()) - head
    for count, context in STEPS:
        prompt = count == context
        rows, sequences = count, 1 if prompt else count
        logits = sequences
        width = -(-context // 16)
        batch = StepBatch(
            tokens=np.arange(rows, dtype=np.int32),
            positions=np.arange(context - rows, context, dtype=np.int32)
            if prompt
            else np.full(rows, context - 1, np.int32),
            query_start=np.linspace(0, rows, sequences + 1).astype(np.int32),
            context_lens=np.full(sequences, context, np.int32),
            block_tables=np.random.default_rng(0)
            .permutation(1024)[: sequences * width]
            .astype(np.int32)
            .reshape(sequences, width),
            logit_rows=np.arange(rows - sequences, rows, dtype=np.int32),
        )
        seconds = clock.best(lambda b=batch: runner.forward(b))
        flops = 2 * (rows * layers + logits * head)
        name = f"step, prompt of {rows}" if prompt else f"step, {rows} rows at {context}"
        yield Line(name, seconds, runner.weight_bytes(), flops)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=["smollm2", "1b"], default="smollm2")
    parser.add_argument("--dtype", choices=BYTES, default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", default="", help="one of: " + ", ".join(_cpu.runnable_isas()))
    parser.add_argument("--cpu-time", action="store_true", help="on a busy machine, with --threads 1")
    parser.add_argument("--only", choices=["gemm", "attention", "step"], action="append")
    args = parser.parse_args(argv)
    ops = _cpu.Ops(args.isa, args.threads)
    clock = Clock(args.cpu_time)
    limits, spec = measure_limits(ops, args.dtype, clock), shape(args.shape)
    parts = {
        "gemm": lambda: gemm_lines(spec, ops, args.dtype, clock),
        "attention": lambda: attention_lines(spec, ops, args.dtype, clock),
        "step": lambda: step_lines(spec, args.dtype, args.threads, args.isa, clock),
    }
    say(f"{ops.isa}, {args.threads} threads, {args.dtype}, {args.shape}")
    say(f"reads {limits.bandwidth / 1e9:.1f} GB/s, multiplies and adds {limits.peak / 1e9:.0f} GFLOP/s")
    say(f"{'':28}{'ms':>9}{'GB/s':>8}{'GFLOP/s':>9}{'of limit':>10}")
    lines = []
    for part in args.only or parts:
        for line in parts[part]():
            lines.append(line)
            gb, gflop = line.bytes / line.seconds / 1e9, line.flops / line.seconds / 1e9
            say(f"{line.name:28}{line.seconds * 1e3:9.2f}{gb:8.1f}{gflop:9.0f}{line.share(limits):10.0%}")
    result = {
        "isa": ops.isa,
        "threads": args.threads,
        "dtype": args.dtype,
        "shape": args.shape,
        "limits": vars(limits),
        "lines": [vars(line) | {"share": line.share(limits)} for line in lines],
    }
    print(json.dumps(result))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
