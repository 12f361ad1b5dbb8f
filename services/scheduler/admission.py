"""Who of the waiting sequences gets a slot next."""

from __future__ import annotations

from collections.abc import Mapping

from services.scheduler.block_space import BlockSpaceManager
from services.scheduler.policy import PeakEstimate, Policy, WaitingQueue
from services.scheduler.prefix_cache import Match
from services.scheduler.request import Key, Sequence

LOOKAHEAD = 8  # waiting sequences tried when the first cannot start
MAX_BYPASS = 64  # later arrivals admitted before one that does not fit


class Admission:
    """The waiting queue and the tests before admission; `begin`, any number of `choose` and `started`, `end`.

    - There are blocks for all its tokens, and probably for those that it and the running ones will grow by.
    - When one does not fit, a few behind it are tried, so that it does not hold up the small ones; it is passed a
      bounded number of times only, so that it does not wait for ever.
    - A sequence whose beginning is just being computed for another waits for that, a step or two.
    """

    def __init__(self, space: BlockSpaceManager, policy: Policy, whole_prompts: bool) -> None:
        """`whole_prompts`: a sequence starts only if the budget takes all that it has to compute."""
        self.waiting = WaitingQueue(policy)
        self.estimate = PeakEstimate(space.block_size)
        self._space = space
        self._whole = whole_prompts
        self._blocked = False  # nobody that waits fits, until somebody comes or leaves
        self._passed: list[Sequence] = []
        self._unfit = False
        self._computing: list[Sequence] = []  # with full blocks in flight that others cannot find yet

    def enqueue(self, seq: Sequence) -> None:
        """The sequence can be admitted from now on."""
        self.waiting.push(seq)
        self._blocked = False

    def changed(self, seq: Sequence) -> None:
        """The sequence is no longer there: it neither waits nor holds blocks."""
        self.waiting.discard(seq)
        self._blocked = False

    def begin(self, running: list[Sequence]) -> bool:
        """Starts a step; False when nobody can be admitted anyway."""
        if self._blocked or not self.waiting:
            return False
        self.estimate.begin(running)
        self._unfit = False
        caching = self._space.cache.enabled
        self._computing = [seq for seq in running if seq.publish_at <= seq.scheduled] if caching else []
        return True

    def choose(self, requests: Mapping[Key, Sequence], budget: int) -> tuple[Sequence, Match] | None:
        """The next to start, and what it can reuse; None when there is none in this step."""
        while len(self._passed) < LOOKAHEAD and (seq := self.waiting.pop()) is not None:
            match = self._space.match(seq, shareable_leader(requests, seq))
            if self._soon_cached(seq, match.matched, budget):
                self._passed.append(seq)
                continue
            if self._whole and seq.total - match.matched > budget:
                self._passed.append(seq)
                break
            if self._fits(seq, match):
                for other in self._passed:
                    other.bypassed += 1
                return seq, match
            self._passed.append(seq)
            self._unfit = True
            if seq.bypassed >= MAX_BYPASS:
                break
        return None

    def started(self, seq: Sequence) -> None:
        """The sequence that was chosen has its slot, blocks and first row."""
        self.estimate.add(seq)
        if seq.node is not None and seq.publish_at <= seq.scheduled:
            self._computing.append(seq)

    def end(self, tried_all: bool) -> None:
        """Ends the step; `tried_all` unless slots or budget ran out."""
        self._blocked = self._unfit and tried_all
        for seq in self._passed:
            self.waiting.push(seq)
        self._passed.clear()

    def _fits(self, seq: Sequence, match: Match) -> bool:
        """Always true of one alone: no limit of a sequence exceeds the pool."""
        room = self._space.room_after(seq, match)
        return room >= 0 and self.estimate.fits(seq, room)

    def _soon_cached(self, seq: Sequence, matched: int, budget: int) -> bool:
        """Whether results to come will bring what the sequence would compute in this step, or half of all it has to.

        Each wait ends with a longer match: a block that begins within the common tokens is about to be published.
        """
        reusable = seq.total - 1 - matched
        if not self._computing or reusable <= 0:
            return False
        end = matched + min((reusable + 1) // 2, budget)
        return any(
            matched < other.publish_at
            and end <= other.scheduled
            and seq.salt == other.salt
            and seq.tokens[:end] == other.tokens[:end]
            for other in self._computing
        )


def shareable_leader(requests: Mapping[Key, Sequence], seq: Sequence) -> Sequence | None:
    """The sample that this one is a fork of, if its prompt is computed and still there."""
    leader = requests.get(seq.fork_key) if seq.fork_key else None
    return leader if leader is not None and leader.shareable else None
