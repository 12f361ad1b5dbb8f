"""How many KV blocks fit: arithmetic over readings, and the readers of the machine's memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.config import EngineConfig
from shared.errors import StartupError
from shared.model_info import ModelInfo

MIB, GIB = 1 << 20, 1 << 30
DEFAULT_UTILIZATION = 0.9
DEFAULT_CPU_CACHE = 4 * GIB  # a CPU shares its memory with all else on the machine, so it is not filled unasked
MARGIN = 0.95  # of what is available, in advice: the reading is another at the next start
BASE_OVERHEAD = 256 * MIB  # libraries, allocator slack, activations of a step


@dataclass(frozen=True)
class Memory:
    """A reading of the device's memory, in bytes."""

    total: int
    available: int


def num_blocks(
    config: EngineConfig,
    info: ModelInfo,
    block_bytes: int,
    weight_bytes: int,
    total: int,
    available: int,
    *,
    on_cpu: bool = True,
) -> int:
    """KV blocks for a worker whose device has `total` bytes, of which `available` are free before weights are loaded.

    `--num-gpu-blocks-override` wins, then `--kv-cache-memory-bytes`; else it is a share of the memory. Never more than
    `max_num_seqs` requests of `max_model_len` can use. Raises StartupError, saying what to change, when the weights do
    not fit or the cache cannot hold one request of `max_model_len`.
    """
    room = available - weight_bytes - overhead(config, info)  # bytes
    if config.num_gpu_blocks_override:
        size, limit = config.num_gpu_blocks_override * block_bytes, "--num-gpu-blocks-override"
    else:
        size, limit = _budget(config, info, weight_bytes, total, on_cpu)
        if room <= 0:
            raise _no_room(config, info, weight_bytes, available)
        if room < size:
            size, limit = room, "the available memory"
    blocks, needed = size // block_bytes, blocks_for(info.max_model_len, config.block_size)
    if blocks < needed:
        raise _too_short(config, info, block_bytes, blocks, needed, int(room * MARGIN), limit)
    if config.num_gpu_blocks_override:
        return blocks
    if (config.kv_cache_memory_bytes or 0) > room:
        raise _too_much(config.kv_cache_memory_bytes or 0, room, needed * block_bytes)
    return min(blocks, needed * config.max_num_seqs)


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


def overhead(config: EngineConfig, info: ModelInfo) -> int:
    """Bytes besides weights and cache: a base, and the logits with the sampler's two copies."""
    return BASE_OVERHEAD + 3 * 4 * info.vocab_size * min(config.max_num_seqs, config.max_num_batched_tokens)


def _budget(config: EngineConfig, info: ModelInfo, weight_bytes: int, total: int, on_cpu: bool) -> tuple[int, str]:
    """Bytes meant for the cache, whatever is available, and what says so."""
    if config.kv_cache_memory_bytes is not None:
        if config.kv_cache_memory_bytes < 1:
            raise StartupError(f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}: must be at least 1")
        return config.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
    utilization = config.gpu_memory_utilization
    if utilization is not None and not 0 < utilization <= 1:
        raise StartupError(f"--gpu-memory-utilization {utilization}: must be above 0 and at most 1")
    whole = int(total * (DEFAULT_UTILIZATION if utilization is None else utilization)) // config.local_workers
    share = whole - weight_bytes - overhead(config, info)
    limit = "the share of the memory (--gpu-memory-utilization)"
    return max(0, min(share, DEFAULT_CPU_CACHE) if on_cpu and utilization is None else share), limit


def _no_room(config: EngineConfig, info: ModelInfo, weight_bytes: int, available: int) -> StartupError:
    taken = _size(weight_bytes + overhead(config, info))
    return StartupError(
        f"the model takes {taken} without any KV cache, but {_size(available)} of memory are available;"
        " choose a smaller model or free memory"
    )


def _too_much(wanted: int, room: int, needed: int) -> StartupError:
    fits = max(needed, int(room * MARGIN))
    return StartupError(
        f"--kv-cache-memory-bytes {wanted}: {_size(wanted)} are more than the {_size(room)} that are free besides the"
        f" model; give --kv-cache-memory-bytes {fits} (or less)"
    )


def _too_short(
    config: EngineConfig, info: ModelInfo, block_bytes: int, blocks: int, needed: int, room: int, limit: str
) -> StartupError:
    advice, fits = [], room // block_bytes
    if 0 < blocks <= fits or (blocks and config.num_gpu_blocks_override):
        advice.append(f"--max-model-len {blocks * config.block_size} (or less)")
    if config.num_gpu_blocks_override:
        advice.append(f"--num-gpu-blocks-override {needed} (or more)")
    elif needed <= fits:
        advice.append(f"--kv-cache-memory-bytes {needed * block_bytes} (or more)")
    elif fits:
        advice.append(f"--max-model-len {fits * config.block_size} with --kv-cache-memory-bytes {fits * block_bytes}")
    return StartupError(
        f"one request of {info.max_model_len} tokens needs {_size(needed * block_bytes)} of KV cache, but {limit} gives"
        f" {_size(blocks * block_bytes)}, enough for {blocks * config.block_size} tokens;"
        f" {'give ' + ', or '.join(advice) if advice else 'free memory or choose a smaller model'}"
    )


def _size(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.2f} MiB"


def read_memory(root: Path = Path("/")) -> Memory:
    """The memory this process may use: the machine's, or less where a control group (v1 or v2) limits it.

    Available is what can be had without swapping; the page cache counts as available.
    """
    machine = _meminfo(root / "proc/meminfo")
    readings = [machine, *_cgroups(root)]
    total = min(reading.total for reading in readings)
    return Memory(total, max(0, min(total, *(reading.available for reading in readings))))


def _meminfo(path: Path) -> Memory:
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    kib = {key: int(value.split()[0]) for key, value in fields.items() if key.startswith("Mem")}
    return Memory(kib["MemTotal"] << 10, kib["MemAvailable"] << 10)


def _cgroups(root: Path) -> list[Memory]:
    """A reading for each control group above this process that has a memory limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    readings = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = base / group.strip("/")
        if not folder.is_dir():  # inside a container the path is the host's, and the own group is the root
            folder = base
        while True:
            readings += _cgroup(folder, *names)
            if folder == base:
                break
            folder = folder.parent
    return readings


def _cgroup(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> list[Memory]:
    try:
        limit = (folder / limit_name).read_text().strip()
        usage = int((folder / usage_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return []
    if not limit.isdigit():  # "max"
        return []
    return [Memory(int(limit), int(limit) - usage + int(stat.get(cache_name, 0)))]
