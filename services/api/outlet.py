"""ASGI messages sent from plain functions: a coroutine per stream and step would cost more than the message."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any

from starlette.types import Message, Send


class Outlet:
    """Sends the messages of one response at once, unless the server makes their sender wait: `busy` then."""

    def __init__(self, send: Send, on_room: Callable[[], None]) -> None:
        """`on_room` is called when messages can be sent again."""
        self._send = send
        self._on_room = on_room
        self._waiting: asyncio.Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Not all has been taken yet: the client reads slowly."""
        return self._waiting is not None

    def write(self, *messages: Message) -> None:
        """Sends messages; not while `busy`."""
        assert not self.busy
        for position, message in enumerate(messages, 1):
            rest = begin(self._send(message))
            if rest is not None:
                self._waiting = asyncio.ensure_future(self._finish(rest, messages[position:]))
                self._waiting.add_done_callback(self._taken)
                return

    def close(self) -> None:
        """Gives up what has not been taken."""
        if self._waiting is not None:
            self._waiting.cancel()

    async def _finish(self, rest: Awaitable[None], messages: Sequence[Message]) -> None:
        await rest
        for message in messages:
            await self._send(message)

    def _taken(self, waiting: asyncio.Future[None]) -> None:
        self._waiting = None
        if not waiting.cancelled():
            waiting.exception()  # the connection is gone, which whoever watches it will say
            self._on_room()


def begin(awaitable: Awaitable[None]) -> Awaitable[None] | None:
    """Runs an awaitable up to where it waits for something; returns what is left of it, None if nothing is.

    As tasks do that are started eagerly (Python 3.12).
    """
    steps = awaitable.__await__()
    try:
        return _rest(next(steps), steps)
    except StopIteration:
        return None


@types.coroutine
def _rest(first: Any, steps: Generator[Any, Any, None]) -> Generator[Any, Any, None]:
    try:
        yield first
    except BaseException as error:
        steps.throw(error)
        raise
    yield from steps
