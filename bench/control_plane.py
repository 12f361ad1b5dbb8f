"""CPU of everything around the model: gateway, tokenizer and scheduler against a worker that answers at once.

    python -m bench.control_plane                    1, 32, 256 and 1024 streams, then requests of 16 tokens
    python -m bench.control_plane --step-ms 10       the same at a model's pace: each token is written on its own
    python -m bench.control_plane --one-layer        the same with a worker that runs a random model of one narrow layer
    python -m bench.control_plane --abandon 2000     memory and descriptors while clients leave early

Real processes on an ipc bus. CPU times are of all threads of a role's processes, from the first request to the end of
the last, so prompts and goodbyes are in them. On a machine busy with other things even CPU time grows, several times;
a fixed loop timed meanwhile says how much, and "quiet" figures are divided by that.

"gap" is how long the worker waited between two steps while there was work: what plan N + 1, sent while step N runs,
does not hide of the way through scheduler and bus. "ms/step" is the run's whole time by its steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import msgspec

from bench import one_layer, processes
from bench.machine import QUIET_NS, Speed
from bench.swarm import Swarm, Tally

STREAMS = {1: 1000, 32: 1000, 256: 400, 1024: 128}  # output tokens of each
BURST = (64, 16)  # requests at once, and output tokens of each, where requests are what is counted
CONTROL = ("api", "tokenizer", "scheduler")
FEW_BLOCKS = 1024  # so that the prefix cache is full, and the scheduler as large as it gets, after a few requests
STATS_SECONDS = 1.2  # by then the scheduler has told its figures
START_SECONDS = 60.0


@dataclass
class Stack:
    """A running server with a null worker."""

    port: int
    pids: dict[int, str]

    def figures(self) -> dict[str, float]:
        """The sums over all series of /metrics, by name."""
        time.sleep(STATS_SECONDS)
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            page = answer.read().decode()
        sums: dict[str, float] = {}
        for name, value in re.findall(r"^([\w:]+)(?:\{.*\})? (\S+)$", page, re.M):
            sums[name] = sums.get(name, 0.0) + float(value)
        return sums


@contextlib.contextmanager
def stack(options: argparse.Namespace) -> Iterator[Stack]:
    """Starts all processes, waits until they serve, and ends them."""
    with tempfile.TemporaryDirectory(prefix="pagebus-") as folder, contextlib.ExitStack() as ends:
        place = ["--scheduler", f"ipc://{folder}"]
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        engine = ["--bind", f"ipc://{folder}", "--max-num-seqs", "1024", "--max-num-batched-tokens", "8192"]
        engine += ["--max-model-len", str(options.max_model_len), "--model", options.model]
        engine += ["--max-step-ms", "0"]  # a null worker's steps teach nothing about prompts
        if options.abandon:
            engine += ["--num-gpu-blocks-override", str(FEW_BLOCKS)]
        null = [] if options.one_layer else ["--null", "--null-step-ms", str(options.step_ms)]
        if options.one_layer:
            engine += ["--model", str(one_layer.write(Path(folder, "model")))]
        commands = [("scheduler", engine), ("worker", [*place, *null])]
        commands += [("tokenizer", place)] * options.tokenizers
        commands += [("api", [*place, "--port", str(port), "--max-concurrent-requests", "4096"])]
        pids = {}
        for role, flags in commands:
            command = [sys.executable, "-m", f"services.{role}", *flags]
            process = subprocess.Popen(command, stderr=None if options.verbose else subprocess.DEVNULL)
            ends.callback(_end, process)
            pids[process.pid] = role
        _wait_ready(port)
        yield Stack(port, pids)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_ready(port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(URLError, ConnectionError), urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        time.sleep(0.1)
    raise SystemExit(f"error: not ready after {START_SECONDS:g} s; --verbose shows what the processes say")


def request(number: int, output_tokens: int) -> bytes:
    """A streaming completion of exactly so many tokens; its prompt of about 64 tokens is like no other's."""
    prompt = f"Request {number}. " + " ".join(f"word{(number * 7919 + i * 104729) % 1000}" for i in range(20))
    body = msgspec.json.encode(
        {
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def measure(stack: Stack, count: int, concurrency: int, output_tokens: int) -> dict[str, Any]:
    """One row: so many requests, so many of them at once."""
    first = time.monotonic_ns() & 0xFFFFFFFF
    requests = [request(first + i, output_tokens) for i in range(count)]
    figures, before = stack.figures(), processes.usage(stack.pids)
    with Speed() as speed:
        tally = Swarm("127.0.0.1", stack.port).run(requests, concurrency)
    after = processes.usage(stack.pids)
    grown = {name: value - figures.get(name, 0.0) for name, value in stack.figures().items()}
    cpu = {role: after[role].cpu - before[role].cpu for role in after}
    return summary(tally, concurrency, output_tokens, cpu, grown, speed.ns)


def summary(
    tally: Tally,
    concurrency: int,
    output_tokens: int,
    cpu: dict[str, float],
    grown: dict[str, float],
    loop_ns: float = QUIET_NS,
) -> dict[str, Any]:
    """The figures of a run; `cpu` in seconds by role, `grown` the growth of the server's counters."""
    tokens, steps = tally.tokens, max(1.0, grown["pagebus:steps_total"])
    control = sum(cpu.get(role, 0.0) for role in CONTROL)
    return {
        "streams": concurrency,
        "output_tokens": output_tokens,
        "tokens_per_second": round(tokens / tally.seconds),
        "requests_per_second": round(tally.requests / tally.seconds, 1),
        "cpu_us_per_token": {role: round(1e6 * seconds / tokens, 2) for role, seconds in cpu.items()},
        "control_us_per_token": round(1e6 * control / tokens, 2),
        "quiet_us_per_token": round(1e6 * control / tokens * QUIET_NS / loop_ns, 2),
        "control_us_per_request": round(1e6 * control / tally.requests, 1),
        "quiet_us_per_request": round(1e6 * control / tally.requests * QUIET_NS / loop_ns, 1),
        "loop_ns": round(loop_ns, 1),
        "client_us_per_token": round(1e6 * tally.cpu / tokens, 2),
        "tokens_per_step": round(tokens / steps, 2),
        "tokens_per_write": round(tokens / max(1, tally.events - 2 * tally.requests), 2),  # less usage and [DONE]
        "ms_per_step": round(1e3 * tally.seconds / steps, 3),
        "gap_us_per_step": round(1e6 * grown["pagebus:idle_seconds_total"] / steps, 1),
        "scheduler_core_us_per_step": round(1e6 * grown["pagebus:schedule_seconds_total"] / steps, 1),
    }


def abandon(stack: Stack, count: int) -> dict[str, Any]:
    """Clients that leave at the first bytes: what the processes hold after a fifth of them, and after all."""
    swarm = Swarm("127.0.0.1", stack.port)
    report: dict[str, Any] = {"abandoned": count}
    requests = [request(i, 1000) for i in range(count)]
    for name, share in (("after_a_fifth", requests[: count // 5]), ("after_all", requests[count // 5 :])):
        swarm.leave_early(share, 50)
        running = stack.figures()["vllm:num_requests_running"]
        report[name] = {
            "running": running,
            "resident_mib": {role: use.resident >> 20 for role, use in processes.usage(stack.pids).items()},
            "descriptors": processes.descriptors(stack.pids),
        }
    return report


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    columns = {
        "streams": "streams",
        "out": "output_tokens",
        "tokens/s": "tokens_per_second",
        "req/s": "requests_per_second",
        **{role: f"cpu_us_per_token.{role}" for role in (*CONTROL, "worker")},
        "control µs/token": "control_us_per_token",
        "quiet": "quiet_us_per_token",
        "µs/request": "control_us_per_request",
        "quiet ": "quiet_us_per_request",
        "tokens/step": "tokens_per_step",
        "tokens/write": "tokens_per_write",
        "ms/step": "ms_per_step",
        "gap µs/step": "gap_us_per_step",
        "core µs/step": "scheduler_core_us_per_step",
        "loop ns": "loop_ns",
    }
    widths = {title: max(8, len(title)) for title in columns}
    lines = ["  ".join(f"{title:>{width}}" for title, width in widths.items())]
    for row in rows:
        flat = row | {f"cpu_us_per_token.{role}": value for role, value in row["cpu_us_per_token"].items()}
        lines.append("  ".join(f"{flat[key]:>{widths[title]}}" for title, key in columns.items()))
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.control_plane", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="whose tokenizer and vocabulary to use (default: the bundled one)")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--step-ms", type=float, default=0.0, help="how long the worker takes for a step")
    parser.add_argument(
        "--one-layer", action="store_true", help="a real worker and a tiny model, instead of a null one"
    )
    parser.add_argument("--tokenizers", type=int, default=1)
    parser.add_argument("--streams", type=int, action="append", help="concurrent streams (repeatable)")
    parser.add_argument("--output-tokens", type=int, help="of each stream")
    parser.add_argument("--requests", type=int, default=2000, help="requests of 16 tokens to send at the end; 0: none")
    parser.add_argument("--abandon", type=int, default=0, help="instead: clients that leave early")
    parser.add_argument("--json", action="store_true", help="JSON alone, without the table")
    parser.add_argument("--verbose", action="store_true", help="show what the processes log")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    options = arguments(argv)
    with stack(options) as running:
        if options.abandon:
            print(json.dumps(abandon(running, options.abandon), indent=2))
            return
        measure(running, 4, 4, 16)
        rows = []
        for streams in options.streams or STREAMS:
            length = options.output_tokens or STREAMS.get(streams, 256)
            rows.append(measure(running, streams, streams, length))
        if options.requests:
            rows.append(measure(running, options.requests, *BURST))
    print(json.dumps(rows, indent=None if options.json else 1))
    if not options.json:
        print(table(rows))


if __name__ == "__main__":
    main()
