"""Links in an asyncio loop (plain or uvloop) by its reader callbacks; zmq.asyncio costs several times as much."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.bus import DRAIN_LIMIT, DealerLink, Link
from shared.messages import Message

Handler = Callable[[list[Message | Link]], None]


class AsyncDealer:
    """A `DealerLink` whose messages are handed to `handler` in batches, in the running loop.

    libzmq's descriptor is edge-triggered, and sending can swallow its signal: everything is drained at each wake-up,
    and the state is looked at again after each send.
    """

    def __init__(self, address: str, identity: bytes, handler: Handler) -> None:
        self._link = DealerLink(address, identity)
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._fds = self._link.descriptors()
        for fd in self._fds:
            self._loop.add_reader(fd, self._drain)
        self._again()

    @property
    def connected(self) -> bool:
        """Whether messages can be sent now."""
        return self._link.connected

    @property
    def address(self) -> str:
        """Where this link leads."""
        return self._link.address

    def send(self, message: Message) -> bool:
        """Queues a message; False when not connected or when the queue is full."""
        sent = self._link.send(message)
        if self._link.pending():
            self._again()
        return sent

    def close(self, flush_seconds: float = 0.0) -> None:
        """Closes the link; the handler is not called again. What is queued gets `flush_seconds` more to leave."""
        if not self._link.socket.closed:
            for fd in self._fds:
                self._loop.remove_reader(fd)
            self._link.flush(flush_seconds)

    def _again(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._scheduled_drain)

    def _scheduled_drain(self) -> None:
        self._scheduled = False
        self._drain()

    def _drain(self) -> None:
        if self._link.socket.closed:
            return
        events = self._link.recv()
        if len(events) >= DRAIN_LIMIT:
            self._again()
        if events:
            self._handler(events)
