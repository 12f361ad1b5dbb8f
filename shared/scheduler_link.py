"""A peer's link to the scheduler in an asyncio loop: the membership handshake, heartbeats, and what is lost between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from shared.addresses import front
from shared.bus import Link
from shared.bus_async import AsyncDealer
from shared.liveness import Membership
from shared.messages import Goodbye, Hello, Message, Unknown, Welcome

TICK_SECONDS = 0.5
FLUSH_SECONDS = 0.2  # for the Goodbye


class SchedulerLink:
    """Keeps the membership and passes on the rest.

    `on_joined` gets each Welcome that follows a Hello: what the scheduler knew of this process, or sent to it, before
    may be lost. `on_left` is called when the scheduler is gone. `on_messages` gets batches as they come; `on_tick` the
    time, every `TICK_SECONDS`.
    """

    def __init__(
        self,
        scheduler: str,
        hello: Hello,
        *,
        on_joined: Callable[[Welcome], None],
        on_left: Callable[[], None],
        on_messages: Callable[[list[Message]], None],
        on_tick: Callable[[float], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._membership = Membership(hello, time.monotonic())
        self._joined = False
        self._on_joined = on_joined
        self._on_left = on_left
        self._on_messages = on_messages
        self._on_tick = on_tick
        self._dealer = AsyncDealer(front(scheduler), hello.instance.encode(), self._receive)
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)

    @property
    def joined(self) -> bool:
        """The scheduler knows this process and is alive."""
        return self._joined

    @property
    def epoch(self) -> int:
        """Of the scheduler that welcomed last."""
        return self._membership.epoch

    def send(self, message: Message) -> bool:
        """Queues a message; False when not connected or when the queue is full."""
        return self._dealer.send(message)

    def close(self) -> None:
        """Takes leave and closes."""
        self._timer.cancel()
        self._dealer.send(Goodbye())
        self._dealer.close(FLUSH_SECONDS)

    def _receive(self, events: list[Message | Link]) -> None:
        now = time.monotonic()
        messages: list[Message] = []
        for event in events:
            if event is Link.UP:
                self._say(self._membership.connected(now))
            elif event is Link.DOWN:
                self._membership.disconnected()
                self._say([])
            elif isinstance(event, Welcome):
                self._welcome(event)
            elif isinstance(event, Unknown):
                self._say(self._membership.unknown())
            elif not isinstance(event, Link):
                messages.append(event)
        self._membership.heard(now)
        if messages:
            self._on_messages(messages)

    def _welcome(self, message: Welcome) -> None:
        repeated = self._joined and message.epoch == self._membership.epoch
        self._membership.welcome(message)
        if not repeated:
            self._joined = True
            self._on_joined(message)

    def _say(self, messages: list[Message]) -> None:
        """Sends what the membership wants said; tells the owner when the scheduler is gone."""
        for message in messages:
            self._dealer.send(message)
        if self._joined and not self._membership.is_member:
            self._joined = False
            self._on_left()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)
        now = time.monotonic()
        self._say(self._membership.tick(now))
        self._on_tick(now)
