"""What machine this is, and how fast it is just now: other load, shared cores and clocks differ between two runs."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path
from typing import Any

LOOPS = 2000
EVERY = 0.05  # seconds
QUIET_NS = 30.0  # of CPU per loop where CPU times are taken as they are
PROBE_SECONDS = 0.8
FLAGS = re.compile(r"avx2|fma|f16c|avx512(f|bw|vl|_bf16|_vnni|_fp16)|avx_vnni|amx_(bf16|int8|tile)")


def description() -> dict[str, Any]:
    """Processor, the instruction sets that matter here, cores and memory; nothing that names this machine."""
    info = dict(re.findall(r"^(.+?)\s*: (.*)$", Path("/proc/cpuinfo").read_text().partition("\n\n")[0], re.M))
    names = ("vendor_id", "model name", "cpu family", "model")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": {name: info[name] for name in names if name in info},
        "flags": [flag for flag in info.get("flags", "").split() if FLAGS.fullmatch(flag)],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / (1 << 30), 1),
    }


def read_bandwidth(threads: int) -> float:
    """Bytes per second that the native probe reads of memory with so many threads: the best of some tries."""
    import numpy as np

    from services.worker import _cpu

    ops = _cpu.Ops("", threads)
    data = np.ones((64, 1 << 20), np.float32)  # 256 MiB
    ops.probe_read(data)
    best, end = 0.0, time.perf_counter() + PROBE_SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        size = ops.probe_read(data)
        best = max(best, size / (time.perf_counter() - start))
    return best


class Speed:
    """CPU time of a fixed loop, sampled while the context lasts: `ns` per iteration, the mean over all samples."""

    def __init__(self) -> None:
        self._end = threading.Event()
        self._samples = [_sample()]
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Speed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(EVERY):
            self._samples.append(_sample())

    @property
    def ns(self) -> float:
        """CPU nanoseconds per iteration."""
        return sum(self._samples) / len(self._samples)


def _sample() -> float:
    start = time.thread_time_ns()
    total = 0
    for i in range(LOOPS):
        total += i
    return (time.thread_time_ns() - start) / LOOPS
