"""Who is alive, both ways. No I/O; time is an argument, in seconds of a monotonic clock.

`Liveness` is the scheduler's side: peers and when they were last heard. `Membership` is a peer's side of the handshake:

    state      event        next       send
    ─────────  ───────────  ─────────  ──────────
    GREETING   Welcome      MEMBER
    MEMBER     Unknown      GREETING   Hello
    GREETING   tick                    Hello        (the first may have been lost)
    MEMBER     tick                    Heartbeat
    any        up           GREETING   Hello        (a lost connection takes its messages with it)
    MEMBER     silence      GREETING   Hello        (the scheduler hangs, or its host is gone)
    any        down         APART
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from typing import Generic, TypeVar

from shared.messages import DEAD_SECONDS, HEARTBEAT_SECONDS, Heartbeat, Hello, Message, Welcome

Key = TypeVar("Key", bound=Hashable)


class Liveness(Generic[Key]):
    """Last-heard times of peers, longest silent first."""

    def __init__(self, dead_after: float = DEAD_SECONDS) -> None:
        self._dead_after = dead_after
        self._heard: dict[Key, float] = {}

    def __contains__(self, peer: Key) -> bool:
        return peer in self._heard

    def __len__(self) -> int:
        return len(self._heard)

    def heard(self, peer: Key, now: float) -> None:
        """A sign of life; adds the peer if it is new."""
        self._heard.pop(peer, None)
        self._heard[peer] = now

    def remove(self, peer: Key) -> None:
        """Forgets a peer; one not there is fine."""
        self._heard.pop(peer, None)

    def take_dead(self, now: float) -> list[Key]:
        """Removes and returns the peers silent for too long."""
        dead: list[Key] = []
        for peer, heard in self._heard.items():
            if now - heard < self._dead_after:
                break
            dead.append(peer)
        for peer in dead:
            del self._heard[peer]
        return dead


class State(enum.Enum):
    """Where a peer stands with the scheduler."""

    APART = "apart"  # no connection
    GREETING = "greeting"  # Hello said, no Welcome yet
    MEMBER = "member"


class Event(enum.Enum):
    """What can happen to a membership."""

    UP = "up"
    DOWN = "down"
    WELCOME = "welcome"
    UNKNOWN = "unknown"
    TICK = "tick"
    SILENCE = "silence"


class Say(enum.Enum):
    """What a transition sends."""

    NOTHING = "nothing"
    HELLO = "hello"
    HEARTBEAT = "heartbeat"


TRANSITIONS: dict[tuple[State, Event], tuple[State, Say]] = {
    (State.APART, Event.UP): (State.GREETING, Say.HELLO),
    (State.GREETING, Event.UP): (State.GREETING, Say.HELLO),
    (State.MEMBER, Event.UP): (State.GREETING, Say.HELLO),
    (State.GREETING, Event.WELCOME): (State.MEMBER, Say.NOTHING),
    (State.GREETING, Event.TICK): (State.GREETING, Say.HELLO),
    (State.MEMBER, Event.TICK): (State.MEMBER, Say.HEARTBEAT),
    (State.MEMBER, Event.UNKNOWN): (State.GREETING, Say.HELLO),
    (State.MEMBER, Event.SILENCE): (State.GREETING, Say.HELLO),
    (State.GREETING, Event.DOWN): (State.APART, Say.NOTHING),
    (State.MEMBER, Event.DOWN): (State.APART, Say.NOTHING),
}  # a pair that is not here changes nothing


class Membership:
    """A peer's standing with the scheduler. Methods return the messages to send to it.

    `hello` may be changed by its owner (a worker's `loaded`); the next Hello carries it.
    """

    def __init__(self, hello: Hello, now: float) -> None:
        self.hello = hello
        self.state = State.APART
        self.epoch = 0  # of the scheduler last welcomed by
        self._heard = now
        self._next_tick = now

    @property
    def is_member(self) -> bool:
        """Whether the scheduler has welcomed this peer and is alive."""
        return self.state is State.MEMBER

    @property
    def wake_at(self) -> float:
        """When to call `tick` next."""
        return self._next_tick

    def connected(self, now: float) -> list[Message]:
        """The link came up."""
        self._heard = now
        self._next_tick = now + HEARTBEAT_SECONDS
        return self._on(Event.UP)

    def disconnected(self) -> None:
        """The link went down."""
        self._on(Event.DOWN)

    def heard(self, now: float) -> None:
        """Any message came from the scheduler."""
        self._heard = now

    def unknown(self) -> list[Message]:
        """The scheduler does not know this peer."""
        return self._on(Event.UNKNOWN)

    def welcome(self, message: Welcome) -> None:
        """The scheduler's answer. Whichever scheduler it is, it knows nothing that this peer told it before Hello."""
        self._on(Event.WELCOME)
        self.epoch = message.epoch

    def tick(self, now: float) -> list[Message]:
        """Time passed: the heartbeat, or Hello again."""
        if now < self._next_tick:
            return []
        self._next_tick = now + HEARTBEAT_SECONDS
        if self.state is State.MEMBER and now - self._heard >= DEAD_SECONDS:
            return self._on(Event.SILENCE)
        return self._on(Event.TICK)

    def _on(self, event: Event) -> list[Message]:
        self.state, say = TRANSITIONS.get((self.state, event), (self.state, Say.NOTHING))
        if say is Say.HELLO:
            return [self.hello]
        return [Heartbeat(epoch=self.epoch)] if say is Say.HEARTBEAT else []
