"""Metrics that take an observation per token: they gather in plain numbers and reach Prometheus in batches."""

from __future__ import annotations

from bisect import bisect_left

from prometheus_client import Counter, Histogram


class BatchHistogram(Histogram):
    """A Histogram that can take the counts of its buckets at once."""

    @property
    def bounds(self) -> list[float]:
        """The upper bounds of the buckets, in order, the last one infinite."""
        return list(self._upper_bounds)

    def add(self, counts: list[int], total: float) -> None:
        """So many observations in each bucket, and their sum."""
        self._sum.inc(total)
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)


class PendingHistogram:
    """Observations of one series until the next `flush`."""

    __slots__ = ("_bounds", "_counts", "_target", "_total")

    def __init__(self, target: BatchHistogram) -> None:
        self._target = target
        self._bounds = target.bounds
        self._counts = [0] * len(self._bounds)
        self._total = 0.0

    def observe(self, amount: float, count: int) -> None:
        """The same amount, `count` times."""
        self._counts[bisect_left(self._bounds, amount)] += count
        self._total += amount * count

    def flush(self) -> None:
        """Hands everything on."""
        if any(self._counts):
            self._target.add(self._counts, self._total)
            self._counts = [0] * len(self._bounds)
            self._total = 0.0


class PendingCounter:
    """Increments of one series until the next `flush`."""

    __slots__ = ("_target", "value")

    def __init__(self, target: Counter) -> None:
        self._target = target
        self.value = 0

    def flush(self) -> None:
        """Hands everything on."""
        self._target.inc(self.value)
        self.value = 0
