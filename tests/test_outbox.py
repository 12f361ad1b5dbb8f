"""The outbox: what is sent, in which order, and what is not."""

from __future__ import annotations

import asyncio
from array import array

import pytest

from shared import outbox
from shared.journal import Entry, Journal
from shared.messages import Abort, Delta, Message, Submit
from shared.outbox import Outbox
from shared.sampling import SamplingParams
from shared.turn import Turn


class Rig:
    """An outbox whose messages are noted instead of sent, while `works`."""

    def __init__(self) -> None:
        self.journal = Journal()
        self.sent: list[Message] = []
        self.works = True
        self.outbox = Outbox(self.journal, self.send, Turn())

    def send(self, message: Message) -> bool:
        if self.works:
            self.sent.append(message)
        return self.works

    def entry(self, size: int = 3) -> Entry:
        params = SamplingParams(max_tokens=9, seed=1)
        return self.journal.open(array("i", range(size)), params, now=0.0)[0]

    def submitted(self) -> list[list[tuple[int, int]]]:
        return [[(r.id, r.attempt) for r in m.requests] for m in self.sent if isinstance(m, Submit)]


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.outbox.restart()
    return rig


async def turn() -> None:
    await asyncio.sleep(0)


async def test_a_turn_s_work_is_one_message_of_each_kind_and_aborts_go_first(rig: Rig) -> None:
    entries = [rig.entry() for _ in range(3)]
    for entry in entries:
        rig.outbox.submit(entry)
    rig.outbox.abort(77)
    rig.outbox.abort(78)
    assert rig.sent == []
    await turn()
    assert [type(message) for message in rig.sent] == [Abort, Submit]
    assert rig.submitted() == [[(0, 0), (1, 0), (2, 0)]]


async def test_what_ends_within_the_turn_is_not_submitted(rig: Rig) -> None:
    gone, ended, kept = rig.entry(), rig.entry(), rig.entry()
    for entry in (gone, ended, kept):
        rig.outbox.submit(entry)
    rig.journal.close(gone)
    ended.finish = "stop"
    await turn()
    assert rig.submitted() == [[(kept.id, 0)]]


async def test_a_restart_submits_the_journal_in_order_and_forgets_aborts(rig: Rig) -> None:
    first, ended, second = rig.entry(), rig.entry(), rig.entry()
    for entry in (first, ended, second):
        rig.outbox.submit(entry)
    await turn()
    rig.outbox.abort(9)
    rig.outbox.shut()
    parked = rig.entry()
    rig.outbox.submit(parked)
    rig.outbox.abort(8)
    ended.accept(Delta(ended.id, 0, 0, [1], "stop"))
    rig.sent.clear()
    await turn()
    assert rig.sent == []
    rig.outbox.restart()
    assert rig.submitted() == [[(first.id, 1), (second.id, 1), (parked.id, 0)]]
    assert [type(message) for message in rig.sent] == [Submit]


async def test_a_resubmission_voids_the_attempt_before_it_is_sent(rig: Rig) -> None:
    entry = rig.entry()
    rig.outbox.submit(entry)
    await turn()
    rig.sent.clear()
    rig.outbox.resubmit(entry)
    assert entry.attempt == 1
    await turn()
    assert isinstance(rig.sent[0], Abort)
    assert rig.submitted() == [[(entry.id, 1)]]


async def test_what_cannot_be_sent_or_was_refused_goes_with_the_next_tick(rig: Rig) -> None:
    first, second = rig.entry(), rig.entry()
    rig.works = False
    rig.outbox.submit(first)
    rig.outbox.abort(5)
    await turn()
    rig.works = True
    rig.outbox.retry(second)
    assert rig.sent == []
    rig.outbox.tick()
    assert rig.sent[0] == Abort([5])
    assert rig.submitted() == [[(first.id, 0), (second.id, 0)]]


async def test_huge_submissions_are_divided(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "SUBMIT_BYTES", 100)
    for size in (20, 20, 20, 40, 1):
        rig.outbox.submit(rig.entry(size))
    await turn()
    assert [[id for id, _ in batch] for batch in rig.submitted()] == [[0, 1], [2, 3], [4]]
