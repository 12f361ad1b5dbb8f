"""Drives a running OpenAI server with a workload and prints what it measured as JSON.

    python -m bench.serve --url http://127.0.0.1:8000 --workload W2
    python -m bench.serve --workload W2 --against transformers --weights path/to/model

Prompts are token ids, drawn anew in every run so that no cache knows them; answers are greedy and of exact length. Any
server with /v1/completions can be driven: pagebus, vLLM, llama.cpp. Times are the client's; a gap is between two pieces
of text of one stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench import processes
from bench.client import Client, Outcome
from bench.workloads import SHAPES, Shot, Workload, workload

PERCENTILES = (50, 90, 99)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 (nearest rank) in milliseconds; empty without values."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    return {f"p{p}": round(1000 * ordered[math.ceil(p / 100 * len(ordered)) - 1], 2) for p in PERCENTILES}


async def drive(client: Client, load: Workload) -> tuple[list[Outcome], list[Outcome]]:
    """Sends a workload. Returns the outcomes of its streams and of its long prompts."""
    long_running = asyncio.create_task(_long_prompts(client, load)) if load.shape.long_prompts else None
    waiting = load.shots()
    outcomes: list[Outcome] = []

    async def lane() -> None:
        while waiting or (long_running is not None and not long_running.done()):
            shot = waiting.pop(0) if waiting else load.shot()
            outcomes.append(await _complete(client, shot))
            if outcomes[-1].error or outcomes[-1].cut:
                return  # a server that refuses would be flooded

    await asyncio.gather(*[lane() for _ in range(load.shape.concurrency)])
    return outcomes, await long_running if long_running is not None else []


async def _long_prompts(client: Client, load: Workload) -> list[Outcome]:
    tasks = []
    for shot in load.long_shots():
        await asyncio.sleep(load.shape.long_every)
        tasks.append(asyncio.create_task(_complete(client, shot)))
    return list(await asyncio.gather(*tasks))


async def _complete(client: Client, shot: Shot) -> Outcome:
    return await client.complete(shot.prompt, shot.output_tokens)


def summarise(outcomes: Sequence[Outcome], long: Sequence[Outcome] = ()) -> dict[str, Any]:
    """Rates and percentiles of a run. Requests that were cut off count with what they had got and waited until then."""
    good = [outcome for outcome in outcomes if not outcome.error and outcome.ended]
    errors = [outcome.error for outcome in [*outcomes, *long] if outcome.error]
    completed = [outcome for outcome in good if not outcome.cut]
    report: dict[str, Any] = {"completed": len(completed), "failed": len(errors)}
    if cut := sum(outcome.cut for outcome in [*outcomes, *long]):
        report["cut_off"] = cut
    if errors:
        report["first_error"] = errors[0]
    if not good:
        return report
    seconds = max(outcome.ended for outcome in good) - min(outcome.sent for outcome in good)
    tokens = sum(outcome.tokens for outcome in good)
    report |= {
        "seconds": round(seconds, 3),
        "output_tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 2),
        "requests_per_second": round(len(completed) / seconds, 3),
        "ms_per_token": percentiles([outcome.token_seconds for outcome in good if outcome.token_seconds]),
        "ttft_ms": percentiles([outcome.ttft for outcome in good]),
        "itl_ms": percentiles([gap for outcome in good for gap in outcome.gaps]),
    }
    windows = [(outcome.sent, outcome.sent + outcome.ttft) for outcome in long if not outcome.error and outcome.ended]
    if windows:
        report["long_prompts"] = _beside_long_prompts(good, long, windows)
    return report


def _beside_long_prompts(
    streams: Sequence[Outcome], long: Sequence[Outcome], windows: list[tuple[float, float]]
) -> dict[str, Any]:
    """The streams while a long prompt was computed, and while none was. A gap counts where it touches a window."""
    busy: list[float] = []
    quiet: list[float] = []
    for outcome in streams:
        for start, end in zip(outcome.arrivals, outcome.arrivals[1:], strict=False):
            touches = any(start < close and end > begin for begin, close in windows)
            (busy if touches else quiet).append(end - start)
    lanes = max(1, _most_at_once(streams))
    rates = {
        f"tokens_per_second_{name}": round(lanes * len(gaps) / sum(gaps), 2)
        for name, gaps in (("busy", busy), ("quiet", quiet))
        if gaps
    }
    return rates | {
        "ttft_ms": percentiles([end - start for start, end in windows]),
        "itl_ms_busy": percentiles(busy),
        "itl_ms_quiet": percentiles(quiet),
    }


def _most_at_once(streams: Sequence[Outcome]) -> int:
    edges = sorted([(s.sent, 1) for s in streams] + [(s.ended, -1) for s in streams])
    running = most = 0
    for _, step in edges:
        running += step
        most = max(most, running)
    return most


def measure(
    client: Client, load: Workload, pids: dict[int, str], warmup: int, limit: float = math.inf
) -> dict[str, Any]:
    """Runs a workload once, for `limit` seconds at most.

    CPU times are of the processes given, from the first request to the end of the last.
    """

    async def run() -> dict[str, Any]:
        for _ in range(warmup):
            await client.complete(load.shot().prompt[:16], 8)
        client.deadline = time.perf_counter() + limit
        before, own = processes.usage(pids), time.process_time()
        outcomes, long = await drive(client, load)
        after, own = processes.usage(pids), time.process_time() - own
        client.deadline = math.inf
        report = summarise(outcomes, long)
        tokens = sum(outcome.tokens for outcome in [*outcomes, *long])
        if tokens:
            report["cpu_us_per_token"] = {
                role: round(1e6 * (after[role].cpu - before[role].cpu) / tokens, 1)
                for role in sorted(before.keys() & after.keys())
            }
            report["client_cpu_us_per_token"] = round(1e6 * own / tokens, 1)
        report["resident_mib"] = {role: after[role].resident >> 20 for role in sorted(after)}
        return report

    return asyncio.run(run())


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.serve", description="Measure a running OpenAI server with a workload."
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="", help="served name (default: the first of /v1/models)")
    parser.add_argument("--workload", choices=SHAPES, default="W2")
    parser.add_argument("--requests", type=int, help="instead of the workload's number")
    parser.add_argument("--concurrency", type=int, help="instead of the workload's number")
    parser.add_argument("--input-tokens", type=int, help="instead of the workload's length")
    parser.add_argument("--output-tokens", type=int, help="instead of the workload's length")
    parser.add_argument("--vocab-size", type=int, default=32000, help="prompts are drawn from ids below this")
    parser.add_argument("--seed", type=int, help="of the prompts (default: the time, so that no cache knows them)")
    parser.add_argument("--warmup", type=int, default=1, help="short requests before the measurement")
    parser.add_argument("--pids", default="", help="role:pid,... to account for (default: pagebus processes here)")
    parser.add_argument("--against", choices=["transformers"], help="measure this too, one request at a time")
    parser.add_argument(
        "--weights", default="", help="model for --against: folder, GGUF file, hub id (default: bundled)"
    )
    parser.add_argument("--against-requests", type=int, default=2, help="how many of the prompts")
    parser.add_argument("--against-dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; returns 1 when a request failed."""
    args = arguments(argv)
    seed = time.time_ns() & 0xFFFFFFFF if args.seed is None else args.seed
    changes = {name: getattr(args, name) for name in ("requests", "concurrency", "input_tokens", "output_tokens")}
    try:
        client = Client(args.url, args.model)
        load = workload(args.workload, args.vocab_size, seed, **changes)
        pids = processes.parse(args.pids) if args.pids else processes.find()
    except (OSError, ValueError) as error:
        print(f"error: {args.url}: {error}", file=sys.stderr)
        return 2
    report = {"workload": args.workload, "url": client.url, "model": client.model, "seed": seed}
    report |= measure(client, load, pids, args.warmup)
    if args.against and "tokens_per_second" in report:
        from bench.against import measure_transformers

        shots = workload(args.workload, args.vocab_size, seed, **changes).shots()[: args.against_requests]
        report["against"] = measure_transformers(args.weights, args.against_dtype, shots)
        report["against"]["ratio"] = round(report["tokens_per_second"] / report["against"]["tokens_per_second"], 2)
    print(json.dumps(report, indent=2))
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
