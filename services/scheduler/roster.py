"""Who has said Hello to this scheduler. No I/O; time is an argument."""

from __future__ import annotations

from shared.liveness import Liveness
from shared.messages import PROTOCOL, Hello, Peer

FRONT_ROLES = frozenset({"api", "tokenizer"})
BACK_ROLES = frozenset({"worker"})


class Roster:
    """The members by socket identity."""

    def __init__(self) -> None:
        self._hellos: dict[bytes, Hello] = {}
        self._liveness: Liveness[bytes] = Liveness()

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._hellos

    def add(self, peer: bytes, hello: Hello, now: float) -> None:
        """A peer is a member from now on."""
        self._hellos[peer] = hello
        self._liveness.heard(peer, now)

    def heard(self, peer: bytes, now: float) -> bool:
        """A sign of life; False if the peer is no member."""
        if peer not in self._hellos:
            return False
        self._liveness.heard(peer, now)
        return True

    def remove(self, peer: bytes) -> Hello | None:
        """Forgets a peer. Returns what it had said, None if it is no member."""
        self._liveness.remove(peer)
        return self._hellos.pop(peer, None)

    def silent(self, now: float) -> list[bytes]:
        """Members not heard for too long; each is named once, and is to be removed."""
        return self._liveness.take_dead(now)

    def of(self, role: str) -> list[bytes]:
        """The members of a role, in order of their Hello."""
        return [peer for peer, hello in self._hellos.items() if hello.role == role]

    def name(self, peer: bytes) -> str:
        """For the log."""
        hello = self._hellos.get(peer)
        return f"{hello.role} {hello.name}" if hello else peer.decode(errors="replace")

    def tokenizers(self) -> list[Peer]:
        """Those that can be connected to: one that still loads has no address."""
        return [
            Peer(hello.instance, hello.address)
            for hello in self._hellos.values()
            if hello.role == "tokenizer" and hello.address
        ]


def refusal(hello: Hello, roles: frozenset[str]) -> str:
    """Why a Hello cannot be accepted on a socket for `roles`; "" if it can."""
    if hello.protocol != PROTOCOL:
        return f"speaks protocol {hello.protocol}, this scheduler {PROTOCOL}: run one version of pagebus"
    if hello.role not in roles:
        return f"has the role {hello.role!r}, which does not connect here"
    return ""
