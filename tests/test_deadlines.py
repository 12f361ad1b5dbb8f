"""The clocks of worker groups: step deadlines, and when the next plan leaves."""

from __future__ import annotations

from math import inf

from services.scheduler.deadlines import LEAST_HOLD, STEPS_KEPT, Clock, Deadlines


def test_time_runs_from_the_plan_or_the_result_before_it() -> None:
    deadlines = Deadlines(10.0)
    assert deadlines.next() == inf
    clock = deadlines.of(1)
    assert deadlines.of(1) is clock
    clock.sent(0.0)
    clock.sent(5.0)
    assert (deadlines.next(), deadlines.missed(9.0), deadlines.missed(10.0)) == (10.0, [], [1])
    clock.done(8.0)  # the second plan can have begun only now
    assert (deadlines.missed(17.0), deadlines.missed(18.0)) == ([], [1])
    clock.done(9.0)
    assert (deadlines.next(), deadlines.missed(100.0)) == (inf, [])
    clock.sent(100.0)
    assert deadlines.next() == 110.0


def test_groups_have_their_own_time() -> None:
    deadlines = Deadlines(1.0)
    deadlines.of(1).sent(0.0)
    deadlines.of(2).sent(0.5)
    assert deadlines.missed(1.0) == [1]
    deadlines.forget(1)
    deadlines.forget(3)
    assert (deadlines.next(), deadlines.missed(1.5)) == (1.5, [2])


def test_an_idle_group_gets_its_plan_at_once() -> None:
    clock = Clock()
    assert clock.next_plan_at() == 0.0
    clock.sent(1.0)
    clock.done(2.0)
    assert clock.next_plan_at() == 0.0


def test_the_second_plan_leaves_halfway_through_the_shortest_recent_step() -> None:
    clock = Clock()
    clock.sent(0.0)
    assert clock.next_plan_at() == 0.0  # nothing is known of its steps yet
    clock.done(0.5)
    clock.sent(1.0)
    clock.sent(1.2)
    clock.done(1.25)
    assert clock.next_plan_at() == 1.25 + 0.125
    for step in range(STEPS_KEPT):
        clock.sent(2.0 + step)
        clock.done(3.0 + step)
    assert clock.next_plan_at() == 2.0 + STEPS_KEPT + 0.5  # the short step is forgotten


def test_short_steps_are_not_waited_for() -> None:
    clock = Clock()
    clock.sent(0.0)
    clock.done(LEAST_HOLD)
    clock.sent(1.0)
    assert clock.next_plan_at() == 0.0
