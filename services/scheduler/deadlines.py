"""When a worker group gets its next plan, and when it owes a result for too long. No I/O; times in seconds."""

from __future__ import annotations

from collections import deque

STEPS_KEPT = 8  # whose shortest is what the step under way is expected to take at least
LEAST_HOLD = 0.015  # a shorter wait is not worth a wake-up of a process whose caches have gone cold


class Clock:
    """The plans in flight of one group epoch."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.since = 0.0  # the step under way began: its plan left, or the result before it came
        self._took: deque[float] = deque(maxlen=STEPS_KEPT)

    def sent(self, now: float) -> None:
        """A plan left."""
        if not self.in_flight:
            self.since = now
        self.in_flight += 1

    def done(self, now: float) -> None:
        """A result came."""
        self._took.append(now - self.since)
        self.in_flight -= 1
        self.since = now

    def next_plan_at(self) -> float:
        """When the next plan should leave: at once for an idle group, else halfway through the step under way.

        It must be there before that step ends, and no sooner than that, so that it takes along who arrives meanwhile.
        """
        hold = min(self._took, default=0.0) / 2
        return self.since + hold if self.in_flight and hold >= LEAST_HOLD else 0.0


class Deadlines:
    """The clocks of all groups, by group epoch."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._clocks: dict[int, Clock] = {}

    def of(self, epoch: int) -> Clock:
        """A group's clock."""
        clock = self._clocks.get(epoch)
        if clock is None:
            clock = self._clocks[epoch] = Clock()
        return clock

    def forget(self, epoch: int) -> None:
        """The group epoch is over."""
        self._clocks.pop(epoch, None)

    def missed(self, now: float) -> list[int]:
        """Epochs of the groups that owe a result for too long."""
        return [
            epoch for epoch, clock in self._clocks.items() if clock.in_flight and now >= clock.since + self._seconds
        ]

    def next(self) -> float:
        """When the next of them will be too late."""
        return (
            min((clock.since for clock in self._clocks.values() if clock.in_flight), default=float("inf"))
            + self._seconds
        )
