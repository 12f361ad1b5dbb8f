"""The choices of the scheduler that are a matter of taste, as small functions."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

from services.scheduler.request import Sequence

Order = tuple[float, int]
Policy = Callable[[Sequence], Order]


def fcfs(seq: Sequence) -> Order:
    """First come, first served; a request resubmitted or preempted keeps the place of its arrival."""
    return seq.order


POLICIES: dict[str, Policy] = {"fcfs": fcfs}


class WaitingQueue:
    """Sequences waiting for a slot, in the order of a policy (least first)."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[Order, Sequence]] = []
        self._waiting: dict[Sequence, int] = {}  # to their tokens when they came
        self.tokens = 0  # of all that wait: the work ahead of a newcomer

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def push(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (self._policy(seq), seq))
        self._waiting[seq] = len(seq.tokens)
        self.tokens += len(seq.tokens)

    def pop(self) -> Sequence | None:
        """The next in order; None when nobody waits."""
        while self._heap:
            _, seq = heapq.heappop(self._heap)
            if seq in self._waiting:
                self.discard(seq)
                return seq
        return None

    def discard(self, seq: Sequence) -> None:
        """The sequence waits no longer, if it did. Such a one never comes back under the same key."""
        self.tokens -= self._waiting.pop(seq, 0)

    def drain(self) -> list[Sequence]:
        """Takes all, in order."""
        out = []
        while (seq := self.pop()) is not None:
            out.append(seq)
        return out


def share_budget(prefills: list[Sequence], budget: int) -> tuple[list[tuple[Sequence, int]], int]:
    """Tokens of a step for unfinished prefills, oldest first, and the tokens kept for newcomers.

    Half the budget goes to the oldest, so that a long prompt always moves on. Of the other half, those that it lets
    finish come first, the shortest before, so that nobody waits behind a long prompt; the rest is the newcomers'.
    """
    chunks = dict.fromkeys(prefills, 0)
    left = _give(chunks, prefills, (budget + 1) // 2) + budget // 2
    for seq in sorted(prefills, key=_left):
        need = _left(seq) - chunks[seq]
        if need > left:
            break
        chunks[seq] += need
        left -= need
    return [(seq, chunk) for seq, chunk in chunks.items()], left


def share_leftover(chunks: list[tuple[Sequence, int]], budget: int) -> list[tuple[Sequence, int]]:
    """Adds what no newcomer took, to the oldest first."""
    out = dict(chunks)
    _give(out, list(out), budget)
    return list(out.items())


def _left(seq: Sequence) -> int:
    return seq.total - seq.scheduled


def _give(chunks: dict[Sequence, int], order: Iterable[Sequence], budget: int) -> int:
    for seq in order:
        extra = min(_left(seq) - chunks[seq], budget)
        chunks[seq] += extra
        budget -= extra
    return budget


class PeakEstimate:
    """How many more blocks the running sequences will need at the worst moment, if they end when expected.

    After LightLLM's past-future scheduler (Gong et al., ASPLOS 2025): outputs of the past tell how long those of the
    future are; the need peaks at the moment some sequence ends, when the shorter ones have freed their blocks.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._mean_output = 256.0  # tokens, of recent requests
        self._needs: list[tuple[int, int]] = []
        self._sum = 0

    def ended(self, num_output: int) -> None:
        """A request ended after this many tokens."""
        self._mean_output += (num_output - self._mean_output) / 32

    def need(self, seq: Sequence) -> tuple[int, int]:
        """Blocks that the sequence is going to take, and those it will have freed after its end."""
        size = self._block_size
        most = seq.max_len
        if not seq.params.ignore_eos:
            typical = seq.num_prompt + int(self._mean_output)
            most = min(most, max(typical, seq.total + size))
        held = -(-seq.total // size)
        return max(-(-most // size) - held, 0), held

    def begin(self, running: Iterable[Sequence]) -> None:
        """Starts over with those that run."""
        self._needs = [self.need(seq) for seq in running]
        self._sum = sum(growth for growth, _ in self._needs)

    def add(self, seq: Sequence) -> None:
        """One more runs."""
        need = self.need(seq)
        self._needs.append(need)
        self._sum += need[0]

    def fits(self, seq: Sequence, free: int) -> bool:
        """Whether the sequence can run beside the others without preemption; `free` blocks are left after admission."""
        need = self.need(seq)
        return self._sum + need[0] <= free or peak_growth([*self._needs, need]) <= free


def peak_growth(needs: list[tuple[int, int]]) -> int:
    """Most additional blocks in use at once; `needs` are (blocks to come, blocks held) of each sequence."""
    peak = 0
    freed = sum(held for _, held in needs)
    for count, (growth, held) in enumerate(sorted(needs, reverse=True), start=1):
        freed -= held
        peak = max(peak, count * growth - freed)
    return peak
