"""The engines that are compared: how each is started, with the settings that its own documentation recommends.

All get the same weights, threads and longest context, and room for `KV_TOKENS` tokens of KV cache where they can be
told; llama.cpp divides its cache evenly among slots, so it gets as much for each as the longest request takes.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.model import Model

KV_TOKENS = 24576  # more than W4 holds at once, less than W2 to W4 write, so that all of it is in memory in the end
MAX_MODEL_LEN = 4096
SLOTS = 32  # requests at once in W2, the workload with the most
FLOATS = ("bfloat16", "float16", "float32")
PLACE = " --host 127.0.0.1 --port '{port}'"  # in every command, as a shell would take it
PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")  # by the documentation of vLLM's CPU build


class Unavailable(Exception):
    """This engine cannot be compared here; the message says why."""


@dataclass(frozen=True)
class Setup:
    """What the engines run. `gguf` holds the same weights for llama.cpp."""

    model: Model
    gguf: Model | None
    threads: int
    max_model_len: int = MAX_MODEL_LEN
    kv_tokens: int = KV_TOKENS


@dataclass(frozen=True)
class Engine:
    """A server to start. `{port}` in the command becomes its port; `kv_bytes` is the room of its KV cache.

    `weight_bytes` is 0 where only the engine knows what it makes of the weights.
    """

    name: str
    command: list[str]
    weight_bytes: int
    kv_bytes: int
    dtype: str
    version: str = ""
    served: str = "model"  # name of the model in requests
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> str:
        """The command without the paths of this machine."""
        words = [f"{key}={_basename(value)}" for key, value in self.environment.items()]
        return shlex.join([*words, *map(_basename, self.command)]).replace(PLACE, "")


def _basename(word: str) -> str:
    return " ".join(Path(part).name if part.startswith("/") else part for part in word.replace(":/", " /").split(" "))


def pagebus(setup: Setup, flags: Sequence[str] = (), quantization: str = "") -> Engine:
    """`pagebus serve` from this checkout, with `flags`; with weights quantised by itself under a name of its own."""
    from shared.version import VERSION

    room = setup.kv_tokens * setup.model.kv_token_bytes
    command = f"-m pagebus serve {setup.model.path} --host 127.0.0.1 --port {{port}} --served-model-name model"
    limits = f"--max-model-len {setup.max_model_len} --threads {setup.threads} --kv-cache-memory-bytes {room}"
    chosen = ["--quantization", quantization] if quantization else []
    words = [sys.executable, *command.split(" "), *limits.split(), *flags, *chosen]
    name = f"pagebus {quantization}".strip()
    own = "--quantization" not in words and setup.model.dtype in FLOATS
    packed = "--quantization gguf" in " ".join(words)
    dtype = setup.model.dtype if own or packed else quantization or f"{setup.model.dtype}, unpacked"
    return Engine(name, words, setup.model.weight_bytes if own else 0, room, dtype, VERSION)


def vllm(setup: Setup, command: str = "vllm serve", dtype: str = "bfloat16", preload: str = "") -> Engine:
    """vLLM's server: its CPU build, all cores computing, with the allocator and OpenMP library that it asks for."""
    if setup.model.path.is_file():
        raise Unavailable("vLLM's CPU build takes folders, not GGUF files")
    words = shlex.split(command)
    program = shutil.which(words[0])
    if program is None:
        raise Unavailable(f"{words[0]} is not installed (--vllm-command)")
    libraries = [str(found) for name in PRELOADED if (found := _library(name, Path(program).parent.parent))]
    size = setup.model.kv_token_bytes * (2 if dtype == "float32" else 1)
    room = setup.kv_tokens * size
    environment = {
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # by default one core computes nothing
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": "3600",  # of its own, which a first compilation can exceed
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": preload or ":".join(libraries),
    }
    flags = f"--dtype {dtype} --max-model-len {setup.max_model_len} --kv-cache-memory-bytes {room}"
    served = "--host 127.0.0.1 --port {port} --served-model-name model"
    model = [] if "{model}" in words else [str(setup.model.path)]
    words = [word.replace("{model}", str(setup.model.path)) for word in [program, *words[1:]]]
    words += [*model, *flags.split(), *served.split(" ")]
    weights = setup.model.weight_bytes * (2 if dtype == "float32" else 1)
    return Engine("vllm", words, weights, room, dtype, _vllm_version(program), environment=environment)


def _library(name: str, root: Path) -> Path | None:
    """A shared library of the system, or of the environment under `root`."""
    folders = [root / "lib", Path("/usr/lib"), Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64")]
    return next((folder / name for folder in folders if (folder / name).exists()), None)


def _vllm_version(program: str) -> str:
    python = Path(program).parent / "python"
    code = "from importlib.metadata import packages_distributions as p, version as v; print(v(p()['vllm'][0]))"
    try:
        found = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    except OSError:
        return ""
    return found.stdout.strip()


def llama_cpp(setup: Setup, server: str = "llama-server") -> Engine:
    """llama.cpp's server: a slot for each request, continuous batching and flash attention as it sets them."""
    program = shutil.which(server)
    if program is None:
        raise Unavailable(f"{server} is not installed (--llama-server)")
    if setup.gguf is None:
        raise Unavailable("llama.cpp takes GGUF files (--gguf)")
    context = SLOTS * setup.max_model_len
    room = context * setup.gguf.kv_token_bytes
    flags = f"-m {setup.gguf.path} -a model -c {context} -np {SLOTS} -cb -t {setup.threads} -tb {setup.threads}"
    words = [program, *flags.split(" "), *"--no-webui --host 127.0.0.1 --port {port}".split(" ")]
    found = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    about = re.search(r"^version: (\S+)(?: \(build (\d+))?", found.stdout + found.stderr, re.M)
    version = " build ".join(filter(None, about.groups())) if about else ""
    return Engine("llama.cpp", words, setup.gguf.weight_bytes, room, setup.gguf.dtype, version)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
