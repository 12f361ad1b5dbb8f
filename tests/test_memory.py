"""The number of KV blocks: the arithmetic, that the advice in every refusal works, and the readers of the system."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.memory import BASE_OVERHEAD, GIB, MIB, Memory, num_blocks, overhead, read_memory
from shared.config import EngineConfig
from shared.errors import StartupError
from shared.model_info import ModelInfo

BLOCK = 184_320  # bytes; SmolLM2 in bfloat16, 16 tokens
WEIGHTS = 256 * MIB


def info(max_model_len: int = 8192) -> ModelInfo:
    return ModelInfo(
        path="", architecture="", vocab_size=1000, max_model_len=max_model_len, eos_token_ids=[], dtype="bfloat16"
    )


def blocks(total: int, available: int | None = None, *, length: int = 8192, on_cpu: bool = True, **flags: Any) -> int:
    config = EngineConfig(**flags)
    free = total if available is None else available
    return num_blocks(config, info(length), BLOCK, WEIGHTS, total, free, on_cpu=on_cpu)


def share(total: float) -> int:
    return (int(total) - WEIGHTS - overhead(EngineConfig(), info())) // BLOCK


def test_a_share_of_the_memory() -> None:
    assert blocks(8 * GIB, gpu_memory_utilization=0.5) == share(4 * GIB)
    assert blocks(8 * GIB, gpu_memory_utilization=0.5, local_workers=2) == share(2 * GIB)
    assert blocks(3 * GIB) == share(3 * GIB * 0.9)


def test_a_cpu_is_not_filled_unasked() -> None:
    assert blocks(64 * GIB) == 4 * GIB // BLOCK
    assert blocks(64 * GIB, gpu_memory_utilization=0.9) > 4 * GIB // BLOCK
    assert blocks(32 * GIB, on_cpu=False, max_num_seqs=512) > 4 * GIB // BLOCK


def test_what_is_in_use_cannot_be_had() -> None:
    assert blocks(64 * GIB, 2 * GIB) == share(2 * GIB)


def test_no_more_than_the_requests_can_use() -> None:
    assert blocks(64 * GIB, length=100, max_num_seqs=3) == 7 * 3
    assert blocks(64 * GIB, length=100, max_num_seqs=3, kv_cache_memory_bytes=GIB) == 7 * 3


def test_bytes_win_over_the_share_and_blocks_over_both() -> None:
    assert blocks(64 * GIB, kv_cache_memory_bytes=GIB) == GIB // BLOCK
    assert blocks(64 * GIB, kv_cache_memory_bytes=GIB, num_gpu_blocks_override=600) == 600
    assert blocks(1, num_gpu_blocks_override=600) == 600


def test_the_overhead_grows_with_the_logits() -> None:
    few = overhead(EngineConfig(max_num_seqs=1), info())
    assert BASE_OVERHEAD < few < overhead(EngineConfig(max_num_seqs=100), info())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"kv_cache_memory_bytes": 8 * MIB},
            r"8192 tokens needs 90.00 MiB .* gives 7.91 MiB, enough for 720 tokens; give --max-model-len 720",
        ),
        ({"kv_cache_memory_bytes": 0}, "--kv-cache-memory-bytes 0: must be at least 1"),
        ({"kv_cache_memory_bytes": -1}, "--kv-cache-memory-bytes -1: must be at least 1"),
        ({"kv_cache_memory_bytes": 10 << 40}, "--kv-cache-memory-bytes 10995116277760: 10240.00 GiB are more than"),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization 0.0: must be above 0 and at most 1"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization 1.5: must be above 0 and at most 1"),
        ({"gpu_memory_utilization": 0.05}, "the share of the memory .* gives 0.00 MiB, enough for 0 tokens; give --kv"),
        ({"num_gpu_blocks_override": 3}, "--num-gpu-blocks-override gives .* enough for 48 tokens"),
    ],
)
def test_refusals_say_what_is_wrong(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        blocks(8 * GIB, **flags)


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(StartupError, match=r"the model takes .* choose a smaller model or free memory"):
        blocks(300 * MIB)
    with pytest.raises(StartupError, match=r"; free memory or choose a smaller model"):
        blocks(WEIGHTS + overhead(EngineConfig(), info()) + BLOCK - 1, gpu_memory_utilization=1)


@pytest.mark.parametrize(
    "flags",
    [{"gpu_memory_utilization": 0}, {"gpu_memory_utilization": 1.5}, {"kv_cache_memory_bytes": -1}, {"block_size": 0}],
)
def test_the_flags_refuse_what_makes_no_sense(flags: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError, match=next(iter(flags))):
        msgspec.convert(flags, EngineConfig)


def advised(message: str) -> list[dict[str, int]]:
    """The sets of flags, each of which should help."""
    return [
        {flag.replace("-", "_"): int(value) for flag, value in re.findall(r"--([a-z-]+) (\d+)", option)}
        for option in message.split("; ")[-1].split(", or ")
        if "--" in option
    ]


@given(
    total=st.integers(1, 64 * GIB),
    free=st.floats(0, 1),
    length=st.integers(1, 1 << 20),
    block_size=st.sampled_from([1, 16, 256]),
    workers=st.integers(1, 3),
    utilization=st.none() | st.floats(0.01, 1),
    cache=st.none() | st.integers(1, 16 * GIB),
    override=st.just(0) | st.integers(1, 10_000),
)
def test_following_the_advice_works(
    total: int,
    free: float,
    length: int,
    block_size: int,
    workers: int,
    utilization: float | None,
    cache: int | None,
    override: int,
) -> None:
    flags: dict[str, Any] = {
        "block_size": block_size,
        "local_workers": workers,
        "gpu_memory_utilization": utilization,
        "kv_cache_memory_bytes": cache,
        "num_gpu_blocks_override": override,
    }
    available = int(total * free)

    def attempt(**changes: int) -> int:
        tokens = changes.pop("max_model_len", length)
        config = EngineConfig(**{**flags, **changes})
        return num_blocks(config, info(tokens), BLOCK, WEIGHTS, total, available)

    try:
        found = attempt()
    except StartupError as error:
        message = str(error)
    else:
        assert found * block_size >= length
        assert override or found * BLOCK <= available - WEIGHTS
        return
    changes = advised(message)
    assert changes or "free memory" in message
    for change in changes:
        assert attempt(**change) * block_size >= change.get("max_model_len", length)


def files(root: Path, contents: dict[str, str]) -> None:
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = "MemTotal:       16384 kB\nMemFree:         1024 kB\nMemAvailable:    8192 kB\nHugePages_Total:   0\n"
MACHINE = Memory(16 * MIB, 8 * MIB)


def v2(limit: str, usage: int, cache: int) -> dict[str, str]:
    return {"memory.max": limit, "memory.current": str(usage), "memory.stat": f"anon 1\ninactive_file {cache}\n"}


def v1(limit: int, usage: int, cache: int) -> dict[str, str]:
    return {
        "memory.limit_in_bytes": str(limit),
        "memory.usage_in_bytes": str(usage),
        "memory.stat": f"cache 1\ntotal_inactive_file {cache}\n",
    }


@pytest.mark.parametrize(
    ("membership", "groups", "expected"),
    [
        (None, {}, MACHINE),
        ("0::/\n", {}, MACHINE),
        ("0::/a/b\n", {"a/b": v2("max", 5, 0)}, MACHINE),
        ("0::/a/b\n", {"a/b": v2(str(4 * MIB), 3 * MIB, MIB)}, Memory(4 * MIB, 2 * MIB)),
        ("0::/a/b\n", {"a/b": v2("max", 0, 0), "a": v2(str(4 * MIB), 3 * MIB, 0)}, Memory(4 * MIB, MIB)),
        ("0::/a/b\n", {"a/b": v2(str(6 * MIB), 0, 0), "a": v2(str(4 * MIB), MIB, 0)}, Memory(4 * MIB, 3 * MIB)),
        ("0::/of/the/host\n", {"": v2(str(4 * MIB), MIB, 0)}, Memory(4 * MIB, 3 * MIB)),
        ("0::/a\n", {"a": v2(str(4 * MIB), 5 * MIB, 0)}, Memory(4 * MIB, 0)),
        ("0::/a\n", {"a": v2(str(1 << 50), 0, 0)}, MACHINE),
        ("3:cpu:/a\n7:memory:/a\n", {"memory/a": v1(4 * MIB, MIB, 0)}, Memory(4 * MIB, 3 * MIB)),
        (
            "7:memory,x:/a\n0::/\n",
            {"memory/a": v1(1 << 62, MIB, 0), "memory": v1(2 * MIB, 0, 0)},
            Memory(2 * MIB, 2 * MIB),
        ),
        ("0::/a\n", {"a": v2("broken", 0, 0)}, MACHINE),
    ],
)
def test_the_limits_of_control_groups(
    membership: str | None, groups: dict[str, dict[str, str]], expected: Memory, tmp_path: Path
) -> None:
    files(tmp_path, {"proc/meminfo": MEMINFO})
    if membership is not None:
        files(tmp_path, {"proc/self/cgroup": membership})
    for group, contents in groups.items():
        files(tmp_path / "sys/fs/cgroup" / group, contents)
    assert read_memory(tmp_path) == expected


def test_this_machine_has_memory() -> None:
    reading = read_memory()
    assert 0 < reading.available <= reading.total
