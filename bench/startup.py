"""Starts `pagebus serve` and prints where the time to the first token, the CPU time and the memory go.

    python -m bench.startup
    python -m bench.startup --runs 5 -- --model path/to/model --max-model-len 2048

The table goes to stderr, JSON to stdout. What stands after `--` goes to `pagebus serve`. Phases are as the processes
log them. Start it once before, so that files are in the page cache; on a busy machine judge by CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.client import Client

PROMPT = "Once upon a time"
OUTPUT_TOKENS = 8
STARTED = re.compile(r"\S+ (\w+)\[(\d+)\] INFO .*started in (\S+) s, (\S+) s of CPU: (.*)")
PHASE = re.compile(r"(\w[\w -]*?) (\d+\.\d+) \((\d+\.\d+)\)")
READY = re.compile(r"ready in \S+ s at (\S+)")


@dataclass
class Phase:
    """A part of a process's start, in seconds."""

    name: str
    wall: float
    cpu: float


@dataclass
class Process:
    """A process of the server, when the first token had come."""

    role: str
    pid: int
    phases: list[Phase] = field(default_factory=list)
    cpu: float = 0.0  # seconds
    resident: int = 0  # bytes
    proportional: int = 0  # bytes, what it shares with others divided among them


@dataclass
class Start:
    """One start. Times in seconds from the command."""

    ready: float
    first_token: float
    processes: list[Process]


def started(line: str) -> Process | None:
    """The process that says in this line of its log what its start was spent on."""
    found = STARTED.match(line)
    if found is None:
        return None
    phases = [Phase(name, float(wall), float(cpu)) for name, wall, cpu in PHASE.findall(found[5])]
    return Process(found[1], int(found[2]), phases)


def start(flags: Sequence[str]) -> Start:
    """Starts a server, waits for its first token and ends it. Raises RuntimeError with its log if it does not start."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "pagebus", "serve", "--host", "127.0.0.1", "--port", "0", *flags]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        url, found = _wait(server)
        ready = time.perf_counter() - began
        outcome = asyncio.run(Client(url).complete(PROMPT, OUTPUT_TOKENS))
        if outcome.error:
            raise RuntimeError(outcome.error)
        launcher = Process("launcher", server.pid)
        for process in (launcher, *found):
            _account(process)
        return Start(ready, outcome.arrivals[0] - began, [launcher, *found])
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate()


def _wait(server: subprocess.Popen[str]) -> tuple[str, list[Process]]:
    """The url, once the server is ready, and its processes."""
    assert server.stdout is not None
    lines, found = [], []
    for line in server.stdout:
        lines.append(line)
        process = started(line)
        if process is not None:
            found.append(process)
        if ready := READY.search(line):
            return ready[1], found
    raise RuntimeError("the server did not start:\n" + "".join(lines))


def _account(process: Process) -> None:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    process.cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # threads that have ended included
    rollup = dict(re.findall(r"^(Rss|Pss): +(\d+) kB", Path(f"/proc/{process.pid}/smaps_rollup").read_text(), re.M))
    process.resident, process.proportional = int(rollup["Rss"]) << 10, int(rollup["Pss"]) << 10


def weight_bytes(flags: Sequence[str]) -> int:
    """Bytes of the weights that a worker of these flags holds."""
    from pagebus.serve import ServeConfig
    from services.worker import loader
    from services.worker.models import decoder_spec
    from shared.config import EngineConfig
    from shared.flags import parse
    from shared.model_config import read_config
    from shared.model_info import read_model_info

    engine, _ = parse([EngineConfig, ServeConfig], flags, prog="pagebus serve", positional="model")
    info = read_model_info(engine)
    spec = decoder_spec(read_config(Path(info.path)), info.max_model_len)
    formats = loader.weight_formats(Path(info.path), spec, engine.quantization)
    return loader.weight_bytes(spec, info.dtype, formats)


def summary(starts: Sequence[Start], weights: int) -> dict[str, Any]:
    """Medians over all starts, and each process of the last one. Memory in MiB, beyond the weights of each worker."""
    last = starts[-1]
    held = weights * sum(process.role == "worker" for process in last.processes)
    resident = sum(process.resident for process in last.processes)
    proportional = sum(process.proportional for process in last.processes)
    return {
        "runs": len(starts),
        "ready_s": round(statistics.median(each.ready for each in starts), 2),
        "first_token_s": round(statistics.median(each.first_token for each in starts), 2),
        "cpu_s": round(statistics.median(sum(process.cpu for process in each.processes) for each in starts), 2),
        "weights_mib": held >> 20,
        "resident_beyond_weights_mib": (resident - held) >> 20,
        "proportional_beyond_weights_mib": (proportional - held) >> 20,
        "processes": [
            {
                "role": process.role,
                "cpu_s": round(process.cpu, 2),
                "resident_mib": process.resident >> 20,
                "proportional_mib": process.proportional >> 20,
                "phases": {phase.name: {"wall_s": phase.wall, "cpu_s": phase.cpu} for phase in process.phases},
            }
            for process in last.processes
        ],
    }


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"{'process':10} {'phase':12} {'wall s':>7} {'CPU s':>7} {'RSS MiB':>8} {'PSS MiB':>8}"]
    for process in report["processes"]:
        memory = f"{process['resident_mib']:8} {process['proportional_mib']:8}"
        lines.append(f"{process['role']:10} {'':12} {'':7} {process['cpu_s']:7.2f} {memory}")
        lines += [
            f"{'':10} {name:12} {phase['wall_s']:7.2f} {phase['cpu_s']:7.2f}"
            for name, phase in process["phases"].items()
        ]
    lines += [
        f"ready after {report['ready_s']} s, first token after {report['first_token_s']} s,"
        f" {report['cpu_s']} s of CPU (medians of {report['runs']})",
        f"beyond {report['weights_mib']} MiB of weights: {report['resident_beyond_weights_mib']} MiB resident,"
        f" {report['proportional_beyond_weights_mib']} MiB with what is shared counted once",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; returns 1 when the server does not start."""
    parser = argparse.ArgumentParser(prog="python -m bench.startup", description="Measure the start of pagebus serve.")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("flags", nargs="*", help="after --: flags for pagebus serve")
    args = parser.parse_args(argv)
    try:
        starts = [start(args.flags) for _ in range(max(1, args.runs))]
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report = summary(starts, weight_bytes(args.flags))
    print(table(report), file=sys.stderr)
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
