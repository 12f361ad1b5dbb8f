"""The baseline: transformers' own `generate`, on the prompts of the workloads, one request at a time or in one batch.

    python -m bench.against --weights path/to/model --workloads W1 W2

Prints a line of JSON when the model is loaded and one at the end. `generate` serves nobody: of W2 it gets a few
requests one after another and as many at once as the workload has streams; W3 and W4 have no meaning for it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench import processes, serve
from bench.client import Outcome
from bench.workloads import SHAPES, Shot, workload
from shared.hub import resolve

WORKLOADS = ("W1", "W2")
ALONE = 2  # requests of W2 that are run one after another


class _Clock:
    """A streamer that notes when each token comes; the first thing it is given is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left over."""


class Generator:
    """A model of transformers, greedy. Raises StartupError when there are no such weights."""

    def __init__(self, weights: str, dtype: str, threads: int = 0) -> None:
        import torch

        if threads:
            torch.set_num_threads(threads)
        self._torch = torch
        self._model = _load(weights, getattr(torch, dtype))
        self.stream(Shot([100] * 16, 2))

    def stream(self, shot: Shot, limit: float = 0.0) -> Outcome:
        """One request, of exactly its length unless `limit` seconds are over before."""
        clock = _Clock()
        start = time.perf_counter()
        self._generate([shot.prompt], shot.output_tokens, limit, streamer=clock)
        arrivals = clock.times[1:]
        cut = len(arrivals) < shot.output_tokens
        return Outcome(start, arrivals, time.perf_counter(), len(arrivals), cut=cut)

    def batch(self, shots: Sequence[Shot], limit: float = 0.0) -> dict[str, Any]:
        """All requests at once, which must be of one length."""
        start = time.perf_counter()
        output = self._generate([shot.prompt for shot in shots], shots[0].output_tokens, limit)
        seconds = time.perf_counter() - start
        tokens = (int(output.shape[1]) - len(shots[0].prompt)) * len(shots)
        report = {
            "seconds": round(seconds, 3),
            "output_tokens": tokens,
            "tokens_per_second": round(tokens / seconds, 2),
        }
        return report | ({"cut_off": len(shots)} if tokens < len(shots) * shots[0].output_tokens else {})

    def _generate(self, prompts: list[list[int]], count: int, limit: float, **more: Any) -> Any:
        ids = self._torch.tensor(prompts)
        more |= {"max_time": limit} if limit else {}
        with self._torch.inference_mode():
            return self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                **more,
            )


def _load(weights: str, dtype: Any) -> Any:
    from transformers import AutoModelForCausalLM

    path = resolve(weights)
    where: dict[str, Any] = {} if path.is_dir() else {"gguf_file": path.name}
    model: Any = AutoModelForCausalLM.from_pretrained(path if path.is_dir() else path.parent, dtype=dtype, **where)
    return model.eval()


def measure_transformers(weights: str, dtype: str, shots: Sequence[Shot]) -> dict[str, Any]:
    """Tokens per second over the prompts, one at a time. Raises StartupError when there are no such weights."""
    import torch

    generator = Generator(weights, dtype)
    start = time.perf_counter()
    tokens = sum(generator.stream(shot).tokens for shot in shots)
    seconds = time.perf_counter() - start
    return {
        "name": "transformers",
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "requests": len(shots),
        "output_tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 2),
    }


def measure(generator: Generator, name: str, shots: Sequence[Shot], limit: float) -> dict[str, dict[str, Any]]:
    """The reports of a workload: of W2 also in a batch, as `W2 batch`."""
    if name == "W1":
        return {name: serve.summarise([generator.stream(shot, limit) for shot in shots])}
    alone = serve.summarise([generator.stream(shot, limit) for shot in shots[:ALONE]])
    for waiting in ("ttft_ms", "itl_ms"):  # of a server that is busy with all; here each waits for none
        alone.pop(waiting, None)
    return {name: alone, f"{name} batch": generator.batch(shots[: SHAPES[name].concurrency], limit)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.against", description=__doc__.partition("\n")[0])
    parser.add_argument("--weights", default="", help="folder, GGUF file or hub id (default: bundled)")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=0, help="default: torch's own choice")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--limit", type=float, default=0.0, help="seconds for each call of generate")
    parser.add_argument("--plan", default="{}", help="JSON: vocab_size, seeds by workload, changes to the workloads")
    args = parser.parse_args(argv)
    generator = Generator(args.weights, args.dtype, args.threads)
    print(json.dumps({"ready": True}), flush=True)
    plan = {"vocab_size": 32000, "seeds": {}, "changes": {}} | json.loads(args.plan)
    reports: dict[str, Any] = {}
    for name in args.workloads:
        load = workload(name, plan["vocab_size"], plan["seeds"].get(name, time.time_ns()), **plan["changes"])
        reports |= measure(generator, name, load.shots(), args.limit)
    print(json.dumps({"workloads": reports, "memory": processes.proportional([os.getpid()])}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
