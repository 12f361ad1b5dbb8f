"""How fast the machine is just now: other load, shared cores and clocks make CPU times of two runs incomparable."""

from __future__ import annotations

import threading
import time

LOOPS = 2000
EVERY = 0.05  # seconds
QUIET_NS = 30.0  # of CPU per loop where CPU times are taken as they are


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
