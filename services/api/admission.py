"""How many requests may be in work at once. Nothing waits here: what is too much is refused at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import RequestError

RETRY_AFTER = 1  # seconds


class Admission:
    """Counts the requests in work against two limits."""

    def __init__(self, limit: int, parked_limit: int) -> None:
        """`limit`: requests in work; `parked_limit`: the same while the engine is away and none can make progress."""
        self.limit = limit
        self.parked_limit = parked_limit
        self.active = 0

    @contextmanager
    def enter(self, *, parked: bool) -> Iterator[None]:
        """Holds a place. Raises RequestError: 429 when all are taken, 503 when too many wait for the engine."""
        if self.active >= self.limit:
            raise RequestError(
                f"The server is working on {self.active} requests, its limit; try again shortly.",
                status=429,
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after=RETRY_AFTER,
            )
        if parked and self.active >= self.parked_limit:
            raise RequestError(
                f"The engine is recovering and {self.active} requests wait for it already; try again shortly.",
                status=503,
                kind="server_error",
                code="overloaded",
                retry_after=RETRY_AFTER,
            )
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1
