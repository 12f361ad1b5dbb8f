"""The persistent batch against plain lists that follow the same plans."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.batch import Batch, PlanError
from services.worker.executor import StepBatch
from shared.messages import Admit, Plan, pack_ids
from shared.sampling import SamplingParams

BLOCK = 4
EOS = [2, 3]


def plan(**fields: object) -> Plan:
    """A plan with nothing in it but `fields`."""
    empty: dict[str, object] = {
        name: [] for name in ("release", "copies", "admit", "slots", "starts", "counts", "samples", "blocks")
    }
    return Plan(1, 1, **{**empty, **fields})  # type: ignore[arg-type]


def admit(slot: int, tokens: list[int], num_prompt: int | None = None, **params: object) -> Admit:
    return Admit(slot, pack_ids(tokens), num_prompt or len(tokens), SamplingParams(**params))  # type: ignore[arg-type]


def rows(*entries: tuple[int, int, int, int, list[int]], **fields: object) -> Plan:
    """A plan of rows (slot, start, count, sample, new blocks)."""
    slots, starts, counts, samples, blocks = (list(column) for column in zip(*entries, strict=True))
    return plan(slots=slots, starts=starts, counts=counts, samples=samples, blocks=blocks, **fields)


def batch_with(tokens: list[int], **params: object) -> Batch:
    """A batch whose slot 0 holds `tokens`, nothing computed."""
    batch = Batch(BLOCK, EOS)
    assert batch.apply(plan(admit=[admit(0, tokens, **params)])) is None
    return batch


@dataclass
class Sequence:
    """What the batch should know of a slot."""

    tokens: list[int]
    computed: int
    table: list[int] = field(default_factory=list)


class Model:
    """A scheduler of sorts: draws valid plans at random and says what step each must give."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sequences: dict[int, Sequence] = {}
        self.next_block = 0

    def plan(self) -> Plan:
        """Releases, admissions and rows, applied to the model."""
        free = [slot for slot in range(40) if slot not in self.sequences]
        release = [slot for slot in self.sequences if self.random.random() < 0.05]
        admits = []
        for slot in release:
            del self.sequences[slot]
        for slot in self.random.sample(free, self.random.randint(0, min(len(free), 4))):
            tokens = [self.random.randrange(1000) for _ in range(self.random.choice([1, 3, BLOCK, 9, 300]))]
            admits.append(admit(slot, tokens, self.random.randint(1, len(tokens))))
            self.sequences[slot] = Sequence(tokens, self.random.randrange(len(tokens)))  # a cached prefix
        drawn = [slot for slot in self.sequences if self.random.random() < 0.8]
        entries = [self._row(slot) for slot in self.random.sample(drawn, len(drawn))]
        if not entries:
            return plan(release=release, admit=admits)
        return rows(*entries, release=release, admit=admits)

    def _row(self, slot: int) -> tuple[int, int, int, int, list[int]]:
        sequence = self.sequences[slot]
        start, left = sequence.computed, len(sequence.tokens) - sequence.computed
        count = self.random.randint(1, left)
        blocks = []
        while (len(sequence.table) + len(blocks)) * BLOCK < start + count:
            blocks.append(self.next_block)
            self.next_block += 1
        sequence.table += blocks
        sequence.computed += count
        return slot, start, count, int(count == left), blocks

    def expect(self, p: Plan, step: StepBatch) -> None:
        """Checks the step's rows one by one."""
        row = 0
        wanted = []
        for s, (slot, start, count, sample) in enumerate(zip(p.slots, p.starts, p.counts, p.samples, strict=True)):
            sequence, end = self.sequences[slot], start + count
            assert step.query_start[s] == row
            assert step.context_lens[s] == end
            assert step.tokens[row : row + count].tolist() == sequence.tokens[start:end]
            assert step.positions[row : row + count].tolist() == list(range(start, end))
            used = -(-end // BLOCK)
            assert step.block_tables[s, :used].tolist() == sequence.table[:used]
            row += count
            wanted += [row - 1] if sample else []
        assert step.query_start[-1] == row == len(step.tokens) == len(step.positions)
        assert step.logit_rows.tolist() == wanted
        assert step.block_tables.flags.c_contiguous
        for array in vars(step).values():
            assert array.dtype == np.int32


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_follows_random_plans(seed: int) -> None:
    model, batch = Model(seed), Batch(BLOCK, EOS)
    for _ in range(40):
        p = model.plan()
        step = batch.apply(p)
        assert len(batch) == len(model.sequences)
        if step is None:
            assert not p.slots
            continue
        model.expect(p, step)
        sampled = [slot for slot, wanted in zip(p.slots, p.samples, strict=True) if wanted]
        tokens = [model.random.randrange(1000) for _ in sampled]
        batch.append(tokens)
        for slot, token in zip(sampled, tokens, strict=True):
            model.sequences[slot].tokens.append(token)


def test_the_first_row_says_where_the_cached_prefix_ends() -> None:
    batch = batch_with(list(range(10)))
    step = batch.apply(rows((0, 7, 3, 1, [5, 6, 7])))
    assert step is not None
    assert step.tokens.tolist() == [7, 8, 9]
    assert step.block_tables.tolist() == [[5, 6, 7]]


def test_a_slot_taken_again_starts_anew() -> None:
    batch = batch_with([1, 2, 3])
    batch.apply(rows((0, 0, 3, 0, [9])))
    step = batch.apply(rows((0, 1, 1, 1, [4]), release=[0], admit=[admit(0, [7, 8])]))
    assert step is not None
    assert (step.tokens.tolist(), step.positions.tolist(), step.block_tables.tolist()) == ([8], [1], [[4]])


def test_a_failed_row_still_has_a_token_for_the_plan_in_flight() -> None:
    batch = batch_with([1, 2])
    p = rows((0, 0, 2, 1, [0]))
    batch.apply(p)
    batch.append([-1])
    step = batch.apply(rows((0, 2, 1, 1, [])))
    assert step is not None
    assert step.tokens.tolist() == [0]


def test_greedy_rows_are_none_and_others_carry_their_output_index() -> None:
    batch = Batch(BLOCK, EOS)
    sampled = admit(1, [5, 6, 7, 8], 2, seed=11)  # two output tokens: resubmitted or preempted
    p = rows((0, 0, 2, 1, [0]), (1, 0, 4, 1, [1]), admit=[admit(0, [1, 2], temperature=0.0), sampled])
    batch.apply(p)
    plain, row = batch.sampling_rows()
    assert plain is None
    assert row is not None
    assert (row.params, row.seed, row.index, row.banned) == (sampled.params, 11, 2, None)
    batch.append([3, 4])
    p = rows((1, 4, 1, 1, [2]), (0, 2, 1, 0, []))
    batch.apply(p)
    (row,) = batch.sampling_rows()
    assert row is not None
    assert row.index == 3


@pytest.mark.parametrize(
    ("params", "banned"),
    [
        ({"min_tokens": 2}, EOS),
        ({"min_tokens": 2, "stop_token_ids": [9]}, [9, *EOS]),
        ({"min_tokens": 2, "stop_token_ids": [9], "ignore_eos": True}, [9]),
        ({"min_tokens": 2, "ignore_eos": True}, None),
        ({"stop_token_ids": [9]}, None),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_bans_what_would_end_the_request(
    params: dict[str, object], banned: list[int] | None, temperature: float
) -> None:
    batch = batch_with([1], temperature=temperature, **params)
    found = []
    for position in range(4):
        p = rows((0, position, 1, 1, [position] if position % BLOCK == 0 else []))
        batch.apply(p)
        (row,) = batch.sampling_rows()
        found.append(row.banned if row else None)
        batch.append([1])
    assert found == [banned, banned, None, None]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (plan(release=[1]), "released but free"),
        (plan(release=[99]), "released but free"),
        (plan(admit=[admit(0, [1])]), "taken"),
        (plan(admit=[admit(1, [1], 2)]), "2 prompt tokens of 1"),
        (rows((1, 0, 1, 0, [1])), "free slot"),
        (rows((-1, 0, 1, 0, [1])), "free slot"),
        (rows((0, 3, 1, 0, []), (0, 4, 1, 0, [])), "two rows"),
        (rows((0, 2, 1, 0, [])), "computed tokens end"),
        (rows((0, 4, 1, 0, [])), "computed tokens end"),
        (rows((0, 3, 0, 0, [])), "no token"),
        (rows((0, 3, 3, 0, [1])), "not known"),
        (rows((0, 3, 2, 1, [])), "past the slot's blocks"),
        (rows((0, 3, 1, 1, [])), "not the slot's last"),
        (rows((1, -1, 1, 0, [1]), admit=[admit(1, [1])]), "computed tokens end"),
    ],
)
def test_a_plan_out_of_order_is_refused(bad: Plan, message: str) -> None:
    batch = batch_with([1, 2, 3, 4, 5])
    batch.apply(rows((0, 0, 3, 0, [0])))
    with pytest.raises(PlanError, match=message):
        batch.apply(bad)


def test_clear_frees_all_slots() -> None:
    batch = batch_with([1, 2, 3])
    batch.clear()
    assert len(batch) == 0
    assert batch.apply(plan(admit=[admit(0, [4])])) is None


def test_one_long_request_takes_no_memory_for_the_others() -> None:
    """The pages of the other slots' rows are never touched."""
    resident = _resident_bytes()
    batch = Batch(BLOCK, EOS)
    batch.apply(plan(admit=[admit(slot, [1, 2]) for slot in range(256)]))
    batch.apply(plan(release=[7], admit=[admit(7, [1] * 400_000)]))  # 256 x 400,000 x 4 bytes = 410 MB of addresses
    assert _resident_bytes() - resident < 40 << 20


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
