"""The state of one sequence while the scheduler serves it."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from shared.messages import Request, unpack_ids

if TYPE_CHECKING:
    from services.scheduler.prefix_cache import Node

Key = tuple[bytes, int]  # the api process (socket identity) and its id of the request


class Status(IntEnum):
    """Where a sequence stands. Everything from FINISHED_STOPPED on is final."""

    WAITING = 0
    PREEMPTED = 1
    RUNNING = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH = 4
    FINISHED_ERROR = 5
    FINISHED_ABORTED = 6


FINISH_REASONS = {
    Status.FINISHED_STOPPED: "stop",
    Status.FINISHED_LENGTH: "length",
    Status.FINISHED_ERROR: "error",
    Status.FINISHED_ABORTED: "abort",
}


class Sequence:
    """One sequence to generate: its tokens, and what of it lies in the KV cache.

    total: 0 ........ scheduled ........ len(tokens) .... total
           | computed by | tokens known,    | sampled by plans |
           | plans sent  | not yet computed | still in flight  |

    `total - scheduled` tokens are left to compute: 1 for a decode, more for a prefill or a recompute.
    """

    __slots__ = (
        "arrival",
        "attempt",
        "blocks",
        "bypassed",
        "cached",
        "capacity",
        "crashes",
        "event_at",
        "fork_key",
        "forks",
        "id",
        "key",
        "last_step",
        "max_len",
        "node",
        "num_prompt",
        "order",
        "params",
        "peer",
        "publish_at",
        "salt",
        "scheduled",
        "shareable",
        "slot",
        "status",
        "stops",
        "tokens",
        "total",
        "unreported",
    )

    def __init__(self, peer: bytes, request: Request, now: float, serial: int) -> None:
        """`now`, in seconds, and the request's age give its place in the order of arrival; `serial` breaks ties."""
        self.peer = peer
        self.id = request.id
        self.key: Key = (peer, request.id)
        self.attempt = request.attempt
        self.params = request.params
        self.salt = request.cache_salt
        self.fork_key: Key | None = (peer, request.fork_of) if request.fork_of >= 0 else None
        self.arrival = now - request.age
        self.order = (self.arrival, serial)

        self.tokens = unpack_ids(request.prompt)
        self.num_prompt = len(self.tokens)
        self.tokens.extend(unpack_ids(request.output))
        self.total = len(self.tokens)
        self.stops: frozenset[int] = frozenset()
        self.max_len = 0  # tokens, prompt included; set by the scheduler

        self.status = Status.WAITING
        self.slot = -1
        self.scheduled = 0
        self.blocks: list[int] = []
        self.capacity = 0  # tokens that fit in `blocks`
        self.node: Node | None = None  # where the prefix cache goes on after the published blocks
        self.publish_at = 0  # computed tokens at which the next block can be published
        self.event_at = 0  # length before which a new token is neither the first nor the last and fills no block
        self.last_step = -1  # the last plan that computes some of it
        self.forks: list[Sequence] = []  # siblings waiting for this one's prompt
        self.shareable = False  # the whole prompt is computed: siblings may share its blocks
        self.bypassed = 0  # times that later arrivals were admitted before it
        self.crashes = 0  # deaths of the worker with this in flight, since the last token
        self.cached = -1  # prompt tokens found in the prefix cache, known at the first admission
        self.unreported = True  # no delta of this attempt has been sent

    @property
    def finished(self) -> bool:
        return self.status >= Status.FINISHED_STOPPED

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def __repr__(self) -> str:
        return f"Sequence({self.id}, {self.status.name}, {self.scheduled}/{self.total} of {self.max_len})"
