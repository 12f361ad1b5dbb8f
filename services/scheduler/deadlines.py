"""Since when each worker group owes the result of a step. No I/O; time is an argument, in seconds."""

from __future__ import annotations


class Deadlines:
    """A group's time runs from the later of its oldest plan in flight and its last result."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._in_flight: dict[int, int] = {}  # plans, by group epoch
        self._since: dict[int, float] = {}

    def sent(self, epoch: int, now: float) -> None:
        """A plan left."""
        self._in_flight[epoch] = self._in_flight.get(epoch, 0) + 1
        self._since.setdefault(epoch, now)

    def done(self, epoch: int, now: float) -> None:
        """A result came."""
        self._in_flight[epoch] -= 1
        if self._in_flight[epoch]:
            self._since[epoch] = now
        else:
            self.forget(epoch)

    def forget(self, epoch: int) -> None:
        """The group epoch is over, or owes nothing."""
        self._in_flight.pop(epoch, None)
        self._since.pop(epoch, None)

    def missed(self, now: float) -> list[int]:
        """Epochs of the groups that are too late."""
        return [epoch for epoch, since in self._since.items() if now - since >= self._seconds]

    def next(self) -> float:
        """When the next deadline is."""
        return min(self._since.values(), default=float("inf")) + self._seconds
