"""Which workers form a group, and which group serves a request. No I/O; time is an argument.

Ranks come one by one and fill groups of `world_size`; extra ones wait as spares. Each change of a group's ranks gives
it a new epoch, under which its ranks load and report ready; a complete, ready group has a `Scheduler`. When a rank
leaves, its group ends: the other ranks go back among the spares, first in line, and the group's requests are placed
anew, in the order in which the clients' requests arrived, so ahead of newer work.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.core import Scheduler
from services.scheduler.counters import Counters
from services.scheduler.request import Key, Sequence
from shared.config import EngineConfig
from shared.errors import RequestError
from shared.messages import Delta, GroupStats, Rejected, Request

Replies = list[tuple[bytes, Delta | Rejected]]  # with the api process to tell

REQUEST_COST = 32  # tokens of prefill that one more request in a group is worth, when groups are compared


class Group:
    """A place for `world_size` ranks; it keeps its number and counters when they change."""

    __slots__ = ("blocks", "counters", "epoch", "index", "ranks", "scheduler")

    def __init__(self, index: int) -> None:
        self.index = index
        self.epoch = 0
        self.ranks: list[bytes] = []  # worker identities, by rank; empty: no group at the moment
        self.blocks: dict[bytes, int] = {}  # KV blocks of the ranks that are ready
        self.scheduler: Scheduler | None = None  # of a ready group
        self.counters = Counters()


class Groups:
    """All worker groups and the requests placed on them, or parked while no group is ready."""

    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        world_size: int = 1,
        first_epoch: int = 1,
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.eos_token_ids = list(eos_token_ids)
        self.world_size = world_size
        self.groups: list[Group] = []
        self.spares: list[bytes] = []
        self.parked: dict[Key, Sequence] = {}
        self._epoch = first_epoch - 1
        self._serial = 0

    # Workers.

    def join(self, worker: bytes) -> list[Group]:
        """A worker is there. Returns the groups formed anew: each rank is to be told its place and the epoch."""
        self.spares.append(worker)
        return self._form()

    def leave(self, worker: bytes) -> tuple[list[Group], Replies]:
        """A worker is gone. Returns the groups formed anew, and what to tell about requests that ended by it."""
        if worker in self.spares:
            self.spares.remove(worker)
            return [], []
        group = self.group_of(worker)
        if group is None:
            return [], []
        self.spares = [rank for rank in group.ranks if rank != worker] + self.spares
        orphans, deltas = group.scheduler.evict_all() if group.scheduler else ([], {})
        group.ranks, group.blocks, group.scheduler = [], {}, None
        replies: Replies = [(peer, delta) for peer, items in deltas.items() for delta in items]
        replies += self._place_all(orphans)
        return self._form(), replies

    def ready(self, worker: bytes, epoch: int, num_blocks: int) -> tuple[Group | None, Replies]:
        """A rank has loaded. Returns its group once that is complete, and what to tell about requests placed on it.

        Requests that only wait elsewhere are shared out anew.
        """
        group = self.find(worker, epoch)
        if group is None:
            return None, []
        group.blocks[worker] = num_blocks
        if len(group.blocks) < self.world_size or group.scheduler is not None:
            return None, []
        least = min(group.blocks.values())
        waiting = [seq for other in self.schedulers() for seq in other.withdraw_waiting()]
        waiting += self.parked.values()
        self.parked.clear()
        group.scheduler = Scheduler(
            self.config,
            least,
            self.max_model_len,
            self.eos_token_ids,
            epoch=group.epoch,
            counters=group.counters,
        )
        return group, self._place_all(waiting)

    def group_of(self, worker: bytes) -> Group | None:
        """The group in which the worker is a rank."""
        return next((group for group in self.groups if worker in group.ranks), None)

    def find(self, worker: bytes, epoch: int) -> Group | None:
        """The worker's group, if what it says belongs to the group's present epoch."""
        group = self.group_of(worker)
        return group if group is not None and group.epoch == epoch else None

    def schedulers(self) -> list[Scheduler]:
        """Those of the ready groups."""
        return [group.scheduler for group in self.groups if group.scheduler is not None]

    def _form(self) -> list[Group]:
        formed = []
        while len(self.spares) >= self.world_size:
            group = next((group for group in self.groups if not group.ranks), None)
            if group is None:
                group = Group(len(self.groups))
                self.groups.append(group)
            self._epoch += 1
            group.epoch = self._epoch
            group.ranks, self.spares = self.spares[: self.world_size], self.spares[self.world_size :]
            formed.append(group)
        return formed

    # Requests.

    def submit(self, peer: bytes, request: Request, now: float) -> Delta | Rejected | None:
        """Takes a request. Returns the answer when it is refused or already complete.

        A later attempt replaces an earlier one; a repetition is ignored. Beyond `max_waiting` only what an earlier
        attempt or the sample that it is a fork of has brought in is taken.
        """
        known = self._known((peer, request.id))
        if known is not None:
            if known.attempt >= request.attempt:
                return None
            self.abort(peer, [request.id])
        is_fork = request.fork_of >= 0 and self._known((peer, request.fork_of)) is not None
        if request.attempt == 0 and not is_fork and self.num_waiting >= self.config.max_waiting:
            message = f"{self.num_waiting} requests are waiting, the most this server takes. Try again later."
            return Rejected(request.id, request.attempt, "overloaded", message)
        self._serial += 1
        return self._place(Sequence(peer, request, now, self._serial))

    def abort(self, peer: bytes, ids: Iterable[int]) -> None:
        """Forgets requests; unknown ones are no matter."""
        for id in ids:
            key = (peer, id)
            if self.parked.pop(key, None) is None:
                any(scheduler.abort(key) for scheduler in self.schedulers())

    def drop_peer(self, peer: bytes) -> None:
        """An api process is gone, and so is the interest in all its requests."""
        keys = [key for requests in self._tables() for key in requests if key[0] == peer]
        self.abort(peer, [id for _, id in keys])

    @property
    def num_waiting(self) -> int:
        return len(self.parked) + sum(scheduler.num_waiting for scheduler in self.schedulers())

    def stats(self, now: float) -> list[GroupStats]:
        """State of every group, ready or not."""
        return [
            group.scheduler.stats(group.index, now)
            if group.scheduler
            else group.counters.stats(group.index, self.config)
            for group in self.groups
        ]

    def _tables(self) -> list[dict[Key, Sequence]]:
        return [self.parked, *(scheduler.requests for scheduler in self.schedulers())]

    def _known(self, key: Key) -> Sequence | None:
        return next((requests[key] for requests in self._tables() if key in requests), None)

    def _place_all(self, sequences: Iterable[Sequence]) -> Replies:
        replies: Replies = []
        for seq in sorted(sequences, key=lambda seq: seq.order):
            answer = self._place(seq)
            if answer is not None:
                replies.append((seq.peer, answer))
        return replies

    def _place(self, seq: Sequence) -> Delta | Rejected | None:
        scheduler = self._choose(seq)
        if scheduler is None:
            self.parked[seq.key] = seq
            return None
        try:
            return scheduler.add(seq)
        except RequestError as error:
            return Rejected(seq.id, seq.attempt, "invalid", error.message)

    def _choose(self, seq: Sequence) -> Scheduler | None:
        """The leader's group for a fork, else the one with the least to compute before and for this request."""
        schedulers = self.schedulers()
        if seq.fork_key is not None:
            for scheduler in schedulers:
                if seq.fork_key in scheduler.requests:
                    return scheduler
        if len(schedulers) < 2:
            return schedulers[0] if schedulers else None
        able = [scheduler for scheduler in schedulers if len(seq.tokens) < scheduler.limits.max_len]
        if not able:
            return max(schedulers, key=lambda scheduler: scheduler.limits.max_len)
        return min(able, key=lambda scheduler: placement_cost(scheduler, seq))


def placement_cost(scheduler: Scheduler, seq: Sequence) -> int:
    """What it costs to serve a sequence here, in tokens: those not cached, those queued before it, and the load."""
    return (
        len(seq.tokens)
        - scheduler.cached_tokens(seq)
        + scheduler.queued_tokens
        + REQUEST_COST * len(scheduler.requests)
    )
