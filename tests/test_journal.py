"""The journal: whatever is lost, repeated or late, the output is the undisturbed one."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.journal import Entry, Journal, Verdict
from shared.messages import Delta, Request, unpack_ids
from shared.sampling import SamplingParams

PROMPT = array("i", [5, 6, 7])


def params(**values: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 12, "seed": 1} | values))  # type: ignore[arg-type]


def opened(**values: object) -> Entry:
    return Journal().open(PROMPT, params(**values), now=0.0)[0]


def token(seed: int, index: int) -> int:
    return (seed * 31 + index * index * 7) % 97


class Undisturbed(RuleBasedStateMachine):
    """Samples of one prompt, a scheduler that computes them, and a network that does what it likes with the deltas."""

    LENGTHS = (7, 12)  # one ends by a stop token, one at max_tokens

    def __init__(self) -> None:
        super().__init__()
        self.journal = Journal()
        self.entries = self.journal.open(PROMPT, params(n=2), now=0.0)
        self.network: list[Delta] = []
        self.scheduler: dict[int, list[int]] = {}  # id to [attempt, index]
        for entry in self.entries:
            self.submit(self.journal.submission(entry, 0.0))

    def submit(self, request: Request) -> None:
        known = unpack_ids(request.output).tolist()
        assert known == [token(request.params.seed or 0, i) for i in range(len(known))]
        assert len(known) < self.length(request.id), "an output that has reached its end is never resubmitted"
        self.scheduler[request.id] = [request.attempt, len(known)]

    def length(self, id: int) -> int:
        return self.LENGTHS[id]

    @rule(id=st.integers(0, 1), count=st.integers(1, 4))
    def compute(self, id: int, count: int) -> None:
        if id not in self.scheduler:
            return
        attempt, index = self.scheduler[id]
        end = min(index + count, self.length(id))
        ids = [token(self.entries[id].params.seed or 0, i) for i in range(index, end)]
        finish = "" if end < self.length(id) else ("stop", "length")[id]
        self.network.append(Delta(id, attempt, index, ids, finish))
        self.scheduler[id][1] = end
        if finish:
            del self.scheduler[id]

    @rule(data=st.data(), keep=st.booleans())
    def deliver(self, data: st.DataObject, keep: bool) -> None:
        if not self.network:
            return
        place = data.draw(st.integers(0, len(self.network) - 1))
        delta = self.network[place] if keep else self.network.pop(place)
        entry = self.entries[delta.id]
        before = len(entry.output)
        verdict = entry.accept(delta)
        assert (len(entry.output) > before or entry.finish != "") or verdict is not Verdict.NEW
        if verdict is Verdict.GAP:
            self.resubmit(entry)

    @precondition(lambda self: self.network)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.network.pop(data.draw(st.integers(0, len(self.network) - 1)))

    @rule()
    def crash(self) -> None:
        """All that a scheduler knows is gone; old deltas may still be on their way."""
        self.scheduler.clear()
        for entry in self.journal.unfinished():
            self.resubmit(entry)

    def resubmit(self, entry: Entry) -> None:
        self.journal.renew(entry)
        self.submit(self.journal.submission(entry, 1.0))

    @invariant()
    def output_is_a_beginning_of_the_undisturbed_one(self) -> None:
        for entry in self.entries:
            expected = [token(entry.params.seed or 0, i) for i in range(self.length(entry.id))]
            assert entry.output.tolist() == expected[: len(entry.output)]
            assert (entry.finish != "") == (len(entry.output) == len(expected))

    def teardown(self) -> None:
        """After one more recovery and a quiet network, all outputs are whole."""
        self.crash()
        self.network.clear()
        for _ in range(20):
            for entry in self.entries:
                self.finish_quietly(entry.id)
        self.output_is_a_beginning_of_the_undisturbed_one()
        assert all(entry.finish for entry in self.entries)

    def finish_quietly(self, id: int) -> None:
        if id in self.scheduler:
            attempt, index = self.scheduler[id]
            finish = "" if index + 1 < self.length(id) else "length"
            ids = [token(self.entries[id].params.seed or 0, index)]
            self.scheduler[id][1] += 1
            if finish:
                del self.scheduler[id]
            assert self.entries[id].accept(Delta(id, attempt, index, ids, finish)) is Verdict.NEW


TestUndisturbed = Undisturbed.TestCase
TestUndisturbed.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=30))
def test_overlapping_deltas_are_cut_to_what_is_new(spans: list[tuple[int, int]]) -> None:
    entry = opened()
    truth = list(range(100, 130))
    for start, count in spans:
        before = len(entry.output)
        verdict = entry.accept(Delta(entry.id, 0, start, truth[start : start + count]))
        assert entry.output.tolist() == truth[: len(entry.output)]
        new = start <= before < start + count
        assert verdict is (Verdict.GAP if start > before else Verdict.NEW if new else Verdict.OLD)


def test_other_attempts_and_ended_entries_take_nothing() -> None:
    entry = opened()
    assert entry.accept(Delta(entry.id, 1, 0, [1])) is Verdict.OLD
    assert entry.accept(Delta(entry.id, 0, 0, [1], "stop", stop_token=1)) is Verdict.NEW
    assert entry.accept(Delta(entry.id, 0, 1, [2])) is Verdict.OLD
    assert (entry.output.tolist(), entry.finish, entry.stop_token) == ([1], "stop", 1)


def test_a_finish_without_new_ids_counts_unless_it_belongs_to_the_past() -> None:
    entry = opened()
    entry.accept(Delta(entry.id, 0, 0, [1, 2]))
    assert entry.accept(Delta(entry.id, 0, 0, [1], "error")) is Verdict.OLD
    assert entry.accept(Delta(entry.id, 0, 2, [], "error", message="m")) is Verdict.NEW
    assert (entry.finish, entry.message) == ("error", "m")


def test_cached_tokens_are_those_of_the_first_attempt() -> None:
    journal = Journal()
    entry = journal.open(PROMPT, params(), now=0.0)[0]
    journal.submission(entry, 0.0)
    entry.accept(Delta(entry.id, 0, 0, [1], cached=2))
    journal.renew(entry)
    entry.accept(Delta(entry.id, 1, 1, [1], cached=3))
    assert entry.cached == 2


def test_a_resubmission_carries_the_output_and_the_next_attempt() -> None:
    journal = Journal()
    entry = journal.open(PROMPT, params(), now=10.0, cache_salt="s")[0]
    first = journal.submission(entry, 12.0)
    assert (first.attempt, first.output, first.age, first.cache_salt) == (0, b"", 2.0, "s")
    assert unpack_ids(first.prompt) == PROMPT
    entry.accept(Delta(entry.id, 0, 0, [8, 9]))
    journal.renew(entry)
    again = journal.submission(entry, 15.0)
    assert (again.attempt, unpack_ids(again.output).tolist(), again.age) == (1, [8, 9], 5.0)
    assert again.params == first.params


def test_an_entry_no_scheduler_has_seen_keeps_its_attempt() -> None:
    journal = Journal()
    entry = journal.open(PROMPT, params(), now=0.0)[0]
    journal.renew(entry)
    assert journal.submission(entry, 0.0).attempt == 0


def test_samples_fork_the_first_one_still_here() -> None:
    journal = Journal()
    journal.open(PROMPT, params(), now=0.0)
    a, b, c = journal.open(PROMPT, params(n=3), now=0.0)
    assert [journal.submission(entry, 0.0).fork_of for entry in (a, b, c)] == [-1, a.id, a.id]
    journal.close(a)
    assert [journal.submission(entry, 0.0).fork_of for entry in (b, c)] == [-1, b.id]
    assert journal.get(a.id) is None
    assert len(journal) == 3


def test_unfinished_are_in_order_of_arrival() -> None:
    journal = Journal()
    entries = [journal.open(PROMPT, params(), now=0.0)[0] for _ in range(4)]
    journal.close(entries[1])
    entries[2].accept(Delta(entries[2].id, 0, 0, [1], "stop"))
    assert journal.unfinished() == [entries[0], entries[3]]


@given(st.integers(-(1 << 63), (1 << 64) - 1))
def test_each_sample_has_a_seed_of_its_own_that_fits_63_bits(seed: int) -> None:
    seeds = [entry.params.seed or 0 for entry in Journal().open(PROMPT, params(seed=seed, n=3), now=0.0)]
    assert len(set(seeds)) == 3
    assert all(0 <= s < 1 << 63 for s in seeds)
    assert seeds[0] == seed % (1 << 63)


def test_seeds_are_drawn_or_follow_from_the_engine_seed_and_the_arrival() -> None:
    def seeds(engine_seed: int) -> list[int | None]:
        journal = Journal()
        return [journal.open(PROMPT, params(seed=None), now=0.0, engine_seed=engine_seed)[0].params.seed for _ in "ab"]

    assert seeds(7) == seeds(7)
    assert len({*seeds(7), *seeds(8), *seeds(0), *seeds(0)}) == 8


@pytest.mark.parametrize(("values", "shown"), [({}, [1, 2]), ({"include_stop_str_in_output": True}, [1, 2, 3])])
def test_the_token_that_ended_it_has_text_only_where_stops_are_included(
    values: dict[str, bool], shown: list[int]
) -> None:
    entry = opened(**values)
    entry.accept(Delta(entry.id, 0, 0, [1, 2, 3], "stop"))
    assert entry.next_ids() == (shown, True)
    assert entry.next_ids() is None


def test_decoding_takes_what_is_new_and_says_when_it_is_the_last() -> None:
    entry = opened()
    assert entry.next_ids() is None
    entry.accept(Delta(entry.id, 0, 0, [1, 2]))
    assert entry.next_ids() == ([1, 2], False)
    entry.accept(Delta(entry.id, 0, 2, [3], "length"))
    assert entry.next_ids() == ([3], True)


def test_what_the_tokenizer_holds_back_is_asked_for_at_the_end() -> None:
    entry = opened()
    entry.accept(Delta(entry.id, 0, 0, [1]))
    entry.next_ids()
    entry.state = b"\xf0"
    entry.accept(Delta(entry.id, 0, 1, [2], "stop"))
    assert entry.next_ids() == ([], True)


def test_ids_are_not_taken_across_the_boundary() -> None:
    entry = opened()
    entry.accept(Delta(entry.id, 0, 0, [1, 2, 3, 4, 5], "length"))
    assert [entry.next_ids(2), entry.next_ids(2), entry.next_ids(2)] == [([1, 2], False), ([3, 4, 5], True), None]
