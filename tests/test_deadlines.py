"""Step deadlines of worker groups."""

from __future__ import annotations

from math import inf

from services.scheduler.deadlines import Deadlines


def test_time_runs_from_the_plan_or_the_result_before_it() -> None:
    deadlines = Deadlines(10.0)
    assert deadlines.next() == inf
    deadlines.sent(1, 0.0)
    deadlines.sent(1, 5.0)
    assert (deadlines.next(), deadlines.missed(9.0), deadlines.missed(10.0)) == (10.0, [], [1])
    deadlines.done(1, 8.0)  # the second plan can have begun only now
    assert (deadlines.missed(17.0), deadlines.missed(18.0)) == ([], [1])
    deadlines.done(1, 9.0)
    assert (deadlines.next(), deadlines.missed(100.0)) == (inf, [])


def test_groups_have_their_own_time() -> None:
    deadlines = Deadlines(1.0)
    deadlines.sent(1, 0.0)
    deadlines.sent(2, 0.5)
    assert deadlines.missed(1.0) == [1]
    deadlines.forget(1)
    deadlines.forget(3)
    assert (deadlines.next(), deadlines.missed(1.5)) == (1.5, [2])
