"""ASGI messages sent from plain functions: a coroutine per stream and step would cost more than the message."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any

from starlette.types import Message, Send

from shared.turn import Turn


class Outlet:
    """Sends the messages of one response when the chunks of all others are made, too; `busy` until they are taken.

    That is at once, unless the server makes their sender wait.
    """

    def __init__(self, send: Send, turn: Turn, on_room: Callable[[], None]) -> None:
        """`on_room` is called when messages can be sent again after a wait, or when none can any more: see `error`."""
        self.busy = False
        self.started = False  # a message has been taken
        self.error: Exception | None = None
        self._send = send
        self._turn = turn
        self._on_room = on_room
        self._messages: Sequence[Message] = ()
        self._waiting: asyncio.Future[None] | None = None

    def write(self, *messages: Message) -> None:
        """Sends messages; not while `busy`."""
        self.busy = True
        self._messages = messages
        self._turn.call(self._flush)

    async def drained(self) -> None:
        """Returns once everything has been taken. Raises `error`."""
        if self._waiting is not None:
            await asyncio.wait({self._waiting})
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Gives up what the server does not take now."""
        if self._messages and self._waiting is None:
            self._flush()
        if self._waiting is not None:
            self._waiting.cancel()

    def _flush(self) -> None:
        """Called for all streams of a step in turn, so none may suffer from another's fault."""
        messages, self._messages = self._messages, ()
        try:
            for position, message in enumerate(messages, 1):
                rest = begin(self._send(message))
                if rest is not None:
                    self._waiting = asyncio.ensure_future(self._finish(rest, messages[position:]))
                    self._waiting.add_done_callback(self._taken)
                    return
                self.started = True
            self.busy = False
        except Exception as error:
            self._failed(error)

    async def _finish(self, rest: Awaitable[None], messages: Sequence[Message]) -> None:
        await rest
        self.started = True
        for message in messages:
            await self._send(message)

    def _taken(self, waiting: asyncio.Future[None]) -> None:
        self._waiting = None
        if waiting.cancelled():
            return
        error = waiting.exception()
        if isinstance(error, Exception):
            self._failed(error)
        else:
            self.busy = False
            self._on_room()

    def _failed(self, error: Exception) -> None:
        self.error, self.busy = error, False
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
