"""Order of waiting, shares of the budget, and the estimate behind admission."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policy import (
    PeakEstimate,
    WaitingQueue,
    fcfs,
    peak_growth,
    share_budget,
    share_leftover,
)
from services.scheduler.request import Sequence
from shared.messages import Request, pack_ids
from shared.sampling import SamplingParams


def sequence(length: int = 1, *, now: float = 0.0, age: float = 0.0, serial: int = 0, **params: object) -> Sequence:
    request = Request(serial, 0, pack_ids([1] * length), SamplingParams(**params), age=age)  # type: ignore[arg-type]
    return Sequence(b"api", request, now, serial)


def test_fcfs_goes_by_the_arrival_at_the_client_side_then_by_order() -> None:
    late = sequence(now=10.0, age=1.0, serial=1)
    resubmitted = sequence(now=11.0, age=5.0, serial=2)
    sibling = sequence(now=11.0, age=5.0, serial=3)
    assert sorted([late, sibling, resubmitted], key=fcfs) == [resubmitted, sibling, late]


def test_the_queue_forgets_those_that_leave_and_knows_its_work() -> None:
    queue = WaitingQueue(fcfs)
    first, second, third = (sequence(n, serial=n) for n in (1, 2, 3))
    for seq in (third, first, second):
        queue.push(seq)
    assert (len(queue), queue.tokens) == (3, 6)
    queue.discard(first)
    queue.discard(first)
    assert set(queue) == {second, third}
    assert queue.pop() is second
    assert (len(queue), queue.tokens) == (1, 3)
    assert queue.drain() == [third]
    assert queue.pop() is None
    assert (len(queue), queue.tokens) == (0, 0)


def shares(needs: list[int], budget: int) -> tuple[list[int], int]:
    prefills = [sequence(need, serial=i) for i, need in enumerate(needs)]
    chunks, left = share_budget(prefills, budget)
    assert [seq for seq, _ in chunks] == prefills
    return [chunk for _, chunk in chunks], left


@pytest.mark.parametrize(
    ("needs", "budget", "chunks", "left"),
    [
        ([], 100, [], 100),
        ([30], 100, [30], 70),  # fits in the half of the oldest
        ([80], 100, [80], 20),  # would end in this step: gets what it needs
        ([1000], 100, [50], 50),  # moves on, and leaves room for newcomers
        ([1000, 20, 10], 100, [50, 20, 10], 20),  # short ones end beside a long one
        ([1000, 900, 40, 30], 100, [50, 0, 0, 30], 20),  # the shortest first
        ([10, 1000], 100, [10, 40], 50),  # the oldest half goes on to the next
        ([5, 5], 1, [1, 0], 0),
    ],
)
def test_half_goes_to_the_oldest_then_to_those_that_end(
    needs: list[int], budget: int, chunks: list[int], left: int
) -> None:
    assert shares(needs, budget) == (chunks, left)


@given(st.lists(st.integers(2, 50), max_size=6), st.integers(1, 60))
def test_shares_never_exceed_need_or_budget_and_the_leftover_is_used(needs: list[int], budget: int) -> None:
    prefills = [sequence(need, serial=i) for i, need in enumerate(needs)]
    chunks, left = share_budget(prefills, budget)
    assert sum(chunk for _, chunk in chunks) + left == budget
    full = share_leftover(chunks, left)
    assert all(0 <= chunk <= seq.total for seq, chunk in full)
    assert sum(chunk for _, chunk in full) == min(budget, sum(needs))
    if prefills:
        assert full[0][1] >= min(needs[0], (budget + 1) // 2)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6))
def test_the_peak_is_that_of_a_simulation(needs: list[tuple[int, int]]) -> None:
    peak = 0
    for time in range(10):
        # Sequences whose growth is behind them have ended and freed what they held.
        growth = sum(time if more >= time else -held for more, held in needs)
        peak = max(peak, growth)
    assert peak_growth(needs) == peak


def running(num_prompt: int, max_len: int, **params: object) -> Sequence:
    seq = sequence(num_prompt, **params)
    seq.max_len = max_len
    return seq


def test_known_lengths_are_counted_in_full() -> None:
    estimate = PeakEstimate(4)
    estimate.begin([running(8, 40, ignore_eos=True)])
    candidate = running(8, 40, ignore_eos=True)
    assert estimate.fits(candidate, 16)
    assert not estimate.fits(candidate, 15)
    estimate.add(candidate)
    assert estimate.fits(running(4, 8, ignore_eos=True), 15)  # its own block is free again by then
    assert not estimate.fits(running(4, 8, ignore_eos=True), 14)


def test_one_ends_before_the_other_grows() -> None:
    estimate = PeakEstimate(4)
    estimate.begin([running(40, 44, ignore_eos=True)])
    assert estimate.fits(running(4, 24, ignore_eos=True), 2)  # grows by 5, of which 10 are free by then


def test_unknown_lengths_are_learnt() -> None:
    estimate = PeakEstimate(4)
    seq = running(8, 4000)
    assert estimate.need(seq) == (64, 2)
    for _ in range(300):
        estimate.ended(8)
    assert estimate.need(seq) == (2, 2)
    seq.total = 100  # longer than usual: expected to end soon
    assert estimate.need(seq) == (1, 25)
