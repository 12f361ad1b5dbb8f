"""What a process spends its start on."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


class Phases:
    """Wall and CPU seconds (of all threads) of this process since it was started, divided into phases.

    As text: `1.02 s, 0.95 s of CPU: imports 0.41 (0.40), weights 0.61 (0.55)`, the CPU time in parentheses.
    """

    def __init__(self) -> None:
        self._ends = [("", time.monotonic() - age(), 0.0)]

    def end(self, name: str) -> None:
        """Names the time since the phase before."""
        self._ends.append((name, time.monotonic(), time.process_time()))

    def __str__(self) -> str:
        (_, began, _), (_, wall, cpu) = self._ends[0], self._ends[-1]
        parts = [
            f"{name} {wall - wall_before:.2f} ({cpu - cpu_before:.2f})"
            for (_, wall_before, cpu_before), (name, wall, cpu) in zip(self._ends, self._ends[1:], strict=False)
        ]
        return f"{wall - began:.2f} s, {cpu:.2f} s of CPU: {', '.join(parts)}"


def age() -> float:
    """Seconds since this process was started; where the system does not tell, its CPU time, which is less."""
    with suppress(OSError, AttributeError, IndexError):
        ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK"))
    return time.process_time()
