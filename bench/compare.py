"""Engines side by side in one run: the same weights, prompts and client; one engine at a time, each a real server.

    python -m bench.compare --model FOLDER --gguf FILE --vllm-command 'vllm serve' --llama-server llama-server

Prints a table of every metric with how many times better pagebus is, and writes JSON for bench.plots. An engine that
is not installed is left out, and said so. `bench.checkpoint` makes the bfloat16 files of the bundled model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import machine, peers, processes, serve
from bench.against import WORKLOADS as OF_TRANSFORMERS
from bench.client import Client
from bench.model import Model, read_model
from bench.peers import Engine, Setup, Unavailable
from bench.server import Server
from bench.tables import OURS, comparison
from bench.workloads import SHAPES, workload
from shared.errors import StartupError

ENGINES = (OURS, "transformers", "vllm", "llama.cpp")
DTYPES = ("bfloat16", "float32", "float16")
CHANGES = ("requests", "concurrency", "input_tokens", "output_tokens")
NEED_ALL = {"W2", "W3", "W4"}  # after these the KV cache has been written whole


@dataclass(frozen=True)
class Plan:
    """What each engine is put through. Times in seconds."""

    workloads: list[str]
    vocab_size: int
    seed: int
    limit: float  # for a workload
    start_limit: float
    changes: dict[str, int | None]

    def seed_of(self, name: str) -> int:
        """The prompts of no workload begin like those of another, which a cache would know."""
        return self.seed * len(SHAPES) + list(SHAPES).index(name)


def measure_server(engine: Engine, plan: Plan) -> dict[str, Any]:
    """An engine's results. Raises RuntimeError when it does not start."""
    with Server(engine.command, engine.environment, plan.start_limit) as server:
        say(f"{engine.name}: ready after {server.ready:.1f} s")
        results: dict[str, Any] = {
            "version": engine.version,
            "dtype": engine.dtype,
            "settings": engine.settings,
            "ready_seconds": round(server.ready, 2),
            "workloads": {},
        }
        client = Client(server.url, engine.served)
        for name in plan.workloads:
            load = workload(name, plan.vocab_size, plan.seed_of(name), **plan.changes)
            report = serve.measure(client, load, roles(server.pids(), engine.name), warmup=1, limit=plan.limit)
            results["workloads"][name] = report
            say(f"{engine.name}: {name} {brief(report)}")
            if not report["completed"] and not report.get("cut_off"):
                say(server.log())
        results["memory"] = memory(processes.proportional(server.pids()), engine, set(plan.workloads))
        return results


def roles(pids: Sequence[int], name: str) -> dict[int, str]:
    """pagebus's processes by role, any other as its engine's."""
    known = processes.find()
    return {pid: known.get(pid, name) for pid in pids}


def memory(resident: int, engine: Engine, workloads: set[str]) -> dict[str, int]:
    """Bytes of all processes; beyond weights and KV cache, where the workloads have surely written all of the cache."""
    found = {"resident": resident, "weights": engine.weight_bytes, "kv": engine.kv_bytes}
    if workloads >= NEED_ALL and engine.weight_bytes:
        found["beyond"] = resident - engine.weight_bytes - engine.kv_bytes
    return found


def measure_transformers(setup: Setup, plan: Plan, dtype: str) -> dict[str, Any]:
    """The results of `generate`, in a process of its own. Raises RuntimeError when that fails."""
    try:
        from transformers import __version__
    except ImportError:
        raise Unavailable("transformers is not installed") from None
    names = [name for name in plan.workloads if name in OF_TRANSFORMERS]
    if not names:
        raise Unavailable("generate runs only " + " and ".join(OF_TRANSFORMERS))
    seeds = {name: plan.seed_of(name) for name in names}
    order = {"vocab_size": plan.vocab_size, "seeds": seeds, "changes": plan.changes}
    flags = ["--dtype", dtype, "--threads", str(setup.threads), "--limit", str(plan.limit), "--plan", json.dumps(order)]
    command = [sys.executable, "-m", "bench.against", "--weights", str(setup.model.path), *flags, "--workloads", *names]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = (line for line in process.stdout if line.startswith("{"))
        next(lines, "")
        ready = time.perf_counter() - began
        last = next(lines, "")
    if not last:
        raise RuntimeError(f"bench.against ended with {process.returncode}")
    results: dict[str, Any] = json.loads(last)
    for name, report in results["workloads"].items():
        say(f"transformers: {name} {brief(report)}")
    weights = setup.model.weight_bytes * (2 if dtype == "float32" else 1)
    held = {"resident": results["memory"], "weights": weights, "kv": 0, "beyond": results["memory"] - weights}
    about = {"version": __version__, "dtype": dtype, "settings": f"generate, {setup.threads} threads"}
    return about | {"ready_seconds": round(ready, 2)} | results | {"memory": held}


def brief(report: dict[str, Any]) -> str:
    """A report in a few words."""
    words = [f"{report.get('tokens_per_second', 0)} tokens/s in {report.get('seconds', 0):.1f} s"]
    words += [f"{report['failed']} failed: {report['first_error']}"] if report.get("failed") else []
    words += [f"{report['cut_off']} cut off"] if "cut_off" in report else []
    return ", ".join(words)


def with_floor(results: dict[str, Any], token_bytes: int, bandwidth: float) -> None:
    """Adds to W1 how many times longer a token takes than reading the weights."""
    first = results.get("workloads", {}).get("W1", {})
    if first.get("ms_per_token"):
        first["times_floor"] = round(first["ms_per_token"]["p50"] / (1e3 * token_bytes / bandwidth), 3)


def jobs(args: argparse.Namespace, setup: Setup, plan: Plan) -> dict[str, Callable[[], dict[str, Any]]]:
    """What to run, by the name of its column; the job of an engine that is not there raises Unavailable."""
    flags = args.pagebus_flags.split()
    found: dict[str, Callable[[], dict[str, Any]]] = {OURS: lambda: measure_server(peers.pagebus(setup, flags), plan)}
    for kind in args.quantizations:
        variant = peers.pagebus(setup, flags, kind)
        found[variant.name] = lambda engine=variant: measure_server(engine, plan)
    for i, dtype in enumerate(args.transformers_dtypes):
        name = f"transformers {dtype}" if i else "transformers"
        found[name] = lambda dtype=dtype: measure_transformers(setup, plan, dtype)
    for i, dtype in enumerate(args.vllm_dtypes):
        name = f"vllm {dtype}" if i else "vllm"
        found[name] = lambda dtype=dtype: measure_server(peers.vllm(setup, args.vllm_command, dtype), plan)
    found["llama.cpp"] = lambda: measure_server(peers.llama_cpp(setup, args.llama_server), plan)
    return {name: job for name, job in found.items() if name.split(" ")[0] in args.engines}


def run(args: argparse.Namespace, setup: Setup, plan: Plan) -> dict[str, Any]:
    """All engines one after another; what was measured is kept, whatever happens to those that follow."""
    shapes = {name: vars(workload(name, plan.vocab_size, 0, **plan.changes).shape) for name in plan.workloads}
    report: dict[str, Any] = {
        "kind": "compare",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine.description(),
        "model": {name: value for name, value in vars(setup.model).items() if name != "path"},
        "threads": setup.threads,
        "limit_seconds": plan.limit,
        "workloads": shapes,
        "read_gb_per_second": {},
        "engines": {},
    }
    for name, job in jobs(args, setup, plan).items():
        before = machine.read_bandwidth(setup.threads)
        try:
            results = job()
        except (Unavailable, RuntimeError, OSError) as error:
            say(f"{name}: left out: {error}")
            results = {"skipped": str(error).splitlines()[0].rstrip(":")}
        report["engines"][name] = results
        fastest = max(before, machine.read_bandwidth(setup.threads))
        report["read_gb_per_second"][name] = round(fastest / 1e9, 2)
        fastest = 1e9 * max(report["read_gb_per_second"].values())
        for other in report["engines"].values():
            with_floor(other, setup.model.token_bytes, fastest)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    return report


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="", help="folder or GGUF file (default: the bundled model)")
    parser.add_argument("--gguf", default="", help="the same weights for llama.cpp (default: the model, if it is one)")
    parser.add_argument("--workloads", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--quantizations", nargs="+", default=[], help="of pagebus, each a column of its own")
    parser.add_argument("--pagebus-flags", default="", help="for pagebus serve, in one word")
    parser.add_argument("--vllm-command", default="vllm serve", help="{model} stands for the folder")
    parser.add_argument("--llama-server", default="llama-server", help="the program")
    for name in ("vllm", "transformers"):
        about = "of its weights, each a column of its own; float32 is the faster where bfloat16 has no instructions"
        parser.add_argument(f"--{name}-dtypes", nargs="+", default=["bfloat16"], choices=DTYPES, help=about)
    parser.add_argument("--threads", type=int, default=peers.cores(), help="default: all cores")
    parser.add_argument("--max-model-len", type=int, default=peers.MAX_MODEL_LEN)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a workload is cut off")
    parser.add_argument("--start-limit", type=float, default=900.0, help="seconds until an engine must be ready")
    parser.add_argument("--seed", type=int, help="of the prompts (default: the time)")
    for name in CHANGES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="instead of the workload's")
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args(argv)


def models(args: argparse.Namespace) -> tuple[Model, Model | None]:
    """The model, and the same weights as GGUF. Raises StartupError."""
    model = read_model(args.model)
    gguf = read_model(args.gguf) if args.gguf else model if model.path.is_file() else None
    return model, gguf


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; returns 1 when pagebus has no results or a request of it failed."""
    args = arguments(argv)
    try:
        model, gguf = models(args)
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    setup = Setup(model, gguf, args.threads, args.max_model_len)
    seed = time.time_ns() & 0xFFFFFFFF if args.seed is None else args.seed
    changes = {name: getattr(args, name) for name in CHANGES}
    plan = Plan(args.workloads, model.vocab_size, seed, args.limit, args.start_limit, changes)
    report = run(args, setup, plan)
    floor = 1e-6 * model.token_bytes / max(report["read_gb_per_second"].values())
    about = f"{model.name}, {model.dtype}; reading the weights takes {floor:.2f} ms"
    print(f"\n{about}. (Nx): pagebus is N times better.\n")
    print(comparison(report))
    ours = report["engines"].get(OURS, {"workloads": {}})
    return int("skipped" in ours or any(load["failed"] for load in ours["workloads"].values()))


def say(text: str) -> None:
    """Progress, apart from the table."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
