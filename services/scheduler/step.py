"""A plan in the making, and what the scheduler remembers of it until its result is back."""

from __future__ import annotations

from operator import mul

from services.scheduler.request import Sequence
from shared.messages import Admit, Plan, pack_ids

NO_BLOCKS: list[int] = []
NONSENSE = -1  # a worker's token where the model computed no valid probabilities
NOT_SAMPLED = -2


class Step:
    """The rows of one plan; parallel lists, as in `Plan`."""

    __slots__ = ("admit", "blocks", "copies", "counts", "number", "planned_at", "rows", "samples", "slots", "starts")

    def __init__(self, number: int, now: float) -> None:
        self.number = number
        self.planned_at = now  # seconds
        self.rows: list[Sequence] = []
        self.slots: list[int] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.samples: list[int] = []
        self.blocks: list[list[int]] = []
        self.copies: list[int] = []
        self.admit: list[Admit] = []

    def compute(self, seq: Sequence, count: int, blocks: list[int] = NO_BLOCKS) -> None:
        """Adds a row: the next `count` tokens of the sequence; a token is sampled if they are the last known ones."""
        start = seq.scheduled
        seq.scheduled = start + count
        seq.last_step = self.number
        sample = seq.scheduled == seq.total
        seq.total += sample
        self.rows.append(seq)
        self.slots.append(seq.slot)
        self.starts.append(start)
        self.counts.append(count)
        self.samples.append(1 if sample else 0)
        self.blocks.append(blocks)

    def admitted(self, seq: Sequence, copies: list[int], count: int) -> None:
        """Adds the first row of a sequence that has just been given its slot and blocks."""
        self.admit.append(Admit(seq.slot, pack_ids(seq.tokens), seq.num_prompt, seq.params))
        self.copies += copies
        self.compute(seq, count, list(seq.blocks))

    def expand(self, tokens: list[int]) -> list[int]:
        """The sampled tokens by row, with NOT_SAMPLED where a row has none."""
        if len(tokens) == len(self.rows):
            return tokens
        results = iter(tokens)
        return [next(results) if sample else NOT_SAMPLED for sample in self.samples]

    def keys(self) -> int:
        """Keys that the rows attend to, in all: what attention costs."""
        old: int = sum(map(mul, self.starts, self.counts))
        return old + sum(count * (count + 1) // 2 if count > 1 else 1 for count in self.counts)

    def plan(self, epoch: int, release: list[int]) -> Plan:
        """The message to the workers."""
        return Plan(
            epoch=epoch,
            step=self.number,
            release=release,
            copies=self.copies,
            admit=self.admit,
            slots=self.slots,
            starts=self.starts,
            counts=self.counts,
            samples=self.samples,
            blocks=self.blocks,
        )
