"""Work put off to the end of a turn of the event loop, so that what comes in one turn is dealt with at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Turn:
    """What is to be called at the end of this turn, in the order in which it was asked for.

    What a call asks for comes after all others: so a step's chunks are all made before the first is written, as each
    write may wake its reader, who takes the processor and its caches.
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []

    def call(self, function: Callable[[], None]) -> None:
        """Calls the function once this turn's messages have been taken; it must not raise."""
        if not self._calls:
            asyncio.get_running_loop().call_soon(self._run)
        self._calls.append(function)

    def _run(self) -> None:
        for function in self._calls:  # which may grow
            function()
        self._calls.clear()
