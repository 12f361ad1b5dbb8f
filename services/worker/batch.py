"""The persistent batch: tokens and block tables of all slots, kept in step with the scheduler by the deltas of plans.

A slot's tokens, and who knows them when:

    0 ........ computed ........ length
    | in the KV cache | known, to be computed |   the next token is the worker's own sample, appended at `length`
"""

from __future__ import annotations

import mmap
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from services.worker.executor import Ints, StepBatch
from services.worker.sampler import Row, is_greedy
from shared.messages import Admit, Plan
from shared.sampling import SamplingParams

UNSET = -1  # `computed` of a slot admitted but not yet scheduled: its first row says where the cached prefix ends


class PlanError(Exception):
    """A plan that does not follow from the ones before it; the slots can no longer be trusted."""


class Batch:
    """Slots 0, 1, 2 ... Arrays grow with use, so a long `max_model_len` costs nothing until a request is as long."""

    def __init__(self, block_size: int, eos_token_ids: list[int]) -> None:
        self.block_size = block_size
        self._eos = eos_token_ids
        self._tokens: Ints = np.empty((0, 256), np.int32)  # [slots, tokens]
        self._tables: Ints = np.empty((0, 16), np.int32)  # [slots, blocks]
        self._length: Ints = np.zeros(0, np.int32)  # tokens known; 0 = the slot is free
        self._computed: Ints = np.zeros(0, np.int32)
        self._num_blocks: Ints = np.zeros(0, np.int32)
        self._num_prompt: Ints = np.zeros(0, np.int32)
        self._plain: NDArray[np.bool_] = np.zeros(0, np.bool_)  # greedy, and nothing is ever banned
        self._sampling: Ints = np.zeros(0, np.int32)  # slots of the last plan's rows that sample
        self._params: list[SamplingParams | None] = []
        self._banned: list[list[int] | None] = []

    def __len__(self) -> int:
        """Slots in use."""
        return int(np.count_nonzero(self._length))

    def clear(self) -> None:
        """Frees all slots."""
        self._length[:] = 0

    def apply(self, plan: Plan) -> StepBatch | None:
        """Takes a plan's deltas; returns the step's rows, None if it has none. Raises PlanError."""
        for slot in plan.release:
            self._release(slot)
        for admit in plan.admit:
            self._admit(admit)
        if not plan.slots:
            return None
        slots = np.array(plan.slots, np.int32)
        starts = np.array(plan.starts, np.int32)
        counts = np.array(plan.counts, np.int32)
        ends = starts + counts
        sampled = np.flatnonzero(np.array(plan.samples, np.bool_))
        self._check_slots(plan.slots)
        if any(plan.blocks):
            self._append_blocks(slots, plan.blocks)
        self._check_rows(slots, starts, ends, sampled)
        self._computed[slots] = ends
        self._sampling = slots[sampled]
        return self._build(slots, starts, counts, sampled)

    def sampling_rows(self) -> list[Row | None]:
        """How to sample each of the last plan's rows with `samples` 1; None for the greedy ones."""
        slots = self._sampling
        rows: list[Row | None] = [None] * len(slots)
        if not self._plain[slots].all():
            drawing = np.flatnonzero(~self._plain[slots])
            indexes = self._length[slots[drawing]] - self._num_prompt[slots[drawing]]
            for i, slot, index in zip(drawing.tolist(), slots[drawing].tolist(), indexes.tolist(), strict=True):
                rows[i] = self._row(slot, index)
        return rows

    def append(self, tokens: list[int]) -> None:
        """Appends what the last plan's rows with `samples` 1 sampled to their slots."""
        if not tokens:
            return
        slots, lengths = self._sampling, self._length[self._sampling]
        self._reserve_tokens(int(lengths.max()) + 1)
        # NOTE: a failed row's request ends, but its next row may be on its way already and needs some token.
        self._tokens[slots, lengths] = np.maximum(np.array(tokens, np.int32), 0)
        self._length[slots] = lengths + 1

    def _release(self, slot: int) -> None:
        if not (0 <= slot < len(self._length) and self._length[slot]):
            raise PlanError(f"slot {slot} is released but free")
        self._length[slot] = 0
        self._params[slot] = self._banned[slot] = None

    def _admit(self, admit: Admit) -> None:
        slot, tokens = admit.slot, np.frombuffer(admit.tokens, "<i4")
        self._reserve_slots(slot + 1)
        self._reserve_tokens(len(tokens))
        if self._length[slot]:
            raise PlanError(f"slot {slot} is admitted to but taken")
        if not 0 < admit.num_prompt <= len(tokens):
            raise PlanError(f"slot {slot} is admitted with {admit.num_prompt} prompt tokens of {len(tokens)} tokens")
        self._tokens[slot, : len(tokens)] = tokens
        self._length[slot] = len(tokens)
        self._num_prompt[slot] = admit.num_prompt
        self._num_blocks[slot] = 0
        self._computed[slot] = UNSET
        params = admit.params
        self._params[slot] = params
        ends = params.stop_token_ids + ([] if params.ignore_eos else self._eos)
        self._banned[slot] = ends if params.min_tokens and ends else None
        self._plain[slot] = is_greedy(params) and self._banned[slot] is None

    def _append_blocks(self, slots: Ints, blocks: list[list[int]]) -> None:
        counts = np.fromiter(map(len, blocks), np.int32, len(slots))
        ends = self._num_blocks[slots] + counts
        self._reserve_blocks(int(ends.max()))
        columns = np.arange(counts.sum()) + np.repeat(ends - np.cumsum(counts), counts)
        flat = np.fromiter(chain.from_iterable(blocks), np.int32, len(columns))
        self._tables[np.repeat(slots, counts), columns] = flat
        self._num_blocks[slots] = ends

    def _check_slots(self, slots: list[int]) -> None:
        if min(slots) < 0 or max(slots) >= len(self._length) or not self._length[slots].all():
            raise PlanError(f"a row of a free slot among {slots}")
        if len(set(slots)) < len(slots):
            raise PlanError(f"two rows of one slot among {slots}")

    def _check_rows(self, slots: Ints, starts: Ints, ends: Ints, sampled: NDArray[np.intp]) -> None:
        computed, length, room = self._computed[slots], self._length[slots], self._num_blocks[slots] * self.block_size
        begins = np.where(computed == UNSET, starts >= 0, starts == computed)
        if not (begins & (ends > starts) & (ends <= np.minimum(length, room))).all():
            rules = {
                "does not start where the computed tokens end": begins,
                "computes no token": ends > starts,
                "computes a token that is not known": ends <= length,
                "lies past the slot's blocks": ends <= room,
            }
            rule, holds = next((rule, holds) for rule, holds in rules.items() if not holds.all())
            i = int(np.flatnonzero(~holds)[0])
            raise PlanError(
                f"slot {slots[i]}: the row of {ends[i] - starts[i]} tokens from {starts[i]} {rule} (computed "
                f"{computed[i]}, known {length[i]}, {self._num_blocks[slots[i]]} blocks)"
            )
        if (ends[sampled] != length[sampled]).any():
            raise PlanError("a row samples the token after one that is not the slot's last")

    def _build(self, slots: Ints, starts: Ints, counts: Ints, sampled: NDArray[np.intp]) -> StepBatch:
        query_start, positions, of_rows = np.arange(len(slots) + 1, dtype=np.int32), starts, slots
        if counts.max() > 1:
            np.cumsum(counts, out=query_start[1:])
            # positions: row t of sequence s is starts[s] + t - query_start[s]
            positions = np.arange(query_start[-1], dtype=np.int32) + np.repeat(starts - query_start[:-1], counts)
            of_rows = np.repeat(slots, counts)
        context_lens = starts + counts
        widest = -(-int(context_lens.max()) // self.block_size)
        return StepBatch(
            tokens=self._tokens[of_rows, positions],
            positions=positions,
            query_start=query_start,
            context_lens=context_lens,
            block_tables=self._tables[slots, :widest],
            logit_rows=query_start[1:][sampled] - 1,
        )

    def _row(self, slot: int, index: int) -> Row:
        params = self._params[slot]
        assert params is not None
        return Row(params, params.seed or 0, index, self._banned[slot] if index < params.min_tokens else None)

    def _reserve_slots(self, slots: int) -> None:
        have = len(self._length)
        if slots <= have:
            return
        slots = max(slots, 2 * have, 16)
        self._tokens = grown(self._tokens, (slots, self._tokens.shape[1]), self._length)
        self._tables = grown(self._tables, (slots, self._tables.shape[1]), self._num_blocks)
        for name in ("_length", "_computed", "_num_blocks", "_num_prompt", "_plain"):
            setattr(self, name, np.pad(getattr(self, name), (0, slots - have)))
        self._params += [None] * (slots - have)
        self._banned += [None] * (slots - have)

    def _reserve_tokens(self, tokens: int) -> None:
        slots, have = self._tokens.shape
        if tokens > have:
            self._tokens = grown(self._tokens, (slots, max(tokens, 2 * have)), self._length)

    def _reserve_blocks(self, blocks: int) -> None:
        slots, have = self._tables.shape
        if blocks > have:
            self._tables = grown(self._tables, (slots, max(blocks, 2 * have)), self._num_blocks)


def grown(array: Ints, shape: tuple[int, int], used: Ints) -> Ints:
    """A larger copy of a 2-d array, of whose rows the first `used` entries count. Its memory is taken page by page."""
    pages = mmap.mmap(-1, shape[0] * shape[1] * array.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)  # NOTE: a huge page would span many rows, and all be taken by one
    larger: Ints = np.frombuffer(pages, array.dtype).reshape(shape)
    for row, count in enumerate(used.tolist()):
        larger[row, :count] = array[row, :count]
    return larger
