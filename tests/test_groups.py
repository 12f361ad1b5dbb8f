"""Forming groups of ranks, and placing requests on them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.core import MAX_CRASHES, Scheduler
from services.scheduler.groups import REQUEST_COST, Group, Groups, Replies
from shared.config import EngineConfig
from shared.messages import Delta, Plan, Rejected, Request, pack_ids
from shared.sampling import SamplingParams
from tests.paged_model import EOS, VOCAB, PagedModel, generate_alone

PEER = b"api"


def make(world_size: int = 1, **flags: Any) -> Groups:
    config = EngineConfig(block_size=4, **flags)
    return Groups(config, max_model_len=128, eos_token_ids=[EOS], world_size=world_size)


def start(groups: Groups, *workers: bytes, blocks: int = 64) -> Replies:
    replies: Replies = []
    for worker in workers:
        groups.join(worker)
    for worker in workers:
        group = groups.group_of(worker)
        assert group is not None
        replies += groups.ready(worker, group.epoch, blocks)[1]
    return replies


def request(
    id: int, tokens: list[int], *, fork_of: int = -1, attempt: int = 0, age: float = 0.0, **params: Any
) -> Request:
    params = {"seed": id, "max_tokens": 8, **params}
    return Request(id, attempt, pack_ids(tokens), SamplingParams(**params), fork_of=fork_of, age=age)


def place_of(groups: Groups, id: int, peer: bytes = PEER) -> int:
    return next((g.index for g in groups.groups if g.scheduler and (peer, id) in g.scheduler.requests), -1)


def run(scheduler: Scheduler) -> dict[int, list[int]]:
    """Lets the group work until it is idle."""
    model = PagedModel(scheduler.space.pool.num_blocks, scheduler.block_size, scheduler.max_running)
    out: dict[int, list[int]] = {}
    while (plan := scheduler.schedule(0.0)) is not None:
        for items in scheduler.update(plan.step, model.run(plan)).values():
            for delta in items:
                out.setdefault(delta.id, []).extend(delta.ids)
    return out


def test_ranks_fill_groups_and_the_rest_are_spares() -> None:
    groups = make(world_size=2)
    assert groups.join(b"a") == []
    (group,) = groups.join(b"b")
    assert (group.index, group.epoch, group.ranks) == (0, 1, [b"a", b"b"])
    assert groups.join(b"c") == []
    assert groups.spares == [b"c"]
    assert groups.ready(b"c", 1, 9) == (None, [])
    assert groups.ready(b"a", 1, 50) == (None, [])
    assert groups.ready(b"b", 2, 40) == (None, [])  # of another epoch
    assert groups.ready(b"b", 1, 40) == (group, [])
    assert group.scheduler is not None
    assert group.scheduler.epoch == 1
    assert group.scheduler.space.pool.num_blocks == 40
    assert groups.ready(b"b", 1, 40) == (None, [])  # said twice


def test_a_spare_steps_in_under_a_new_epoch_and_the_survivor_comes_first() -> None:
    groups = make(world_size=2)
    start(groups, b"a", b"b")
    groups.join(b"c")
    formed, replies = groups.leave(b"a")
    assert replies == []
    assert [(g.index, g.epoch, g.ranks, g.scheduler) for g in formed] == [(0, 2, [b"b", b"c"], None)]
    assert groups.find(b"b", 1) is None
    assert groups.find(b"b", 2) is groups.groups[0]


def test_a_broken_group_waits_and_its_survivor_can_mend_another() -> None:
    groups = make(world_size=2)
    start(groups, b"a", b"b", b"c", b"d")
    assert groups.leave(b"a")[0] == []
    assert groups.spares == [b"b"]
    assert [stats.ready for stats in groups.stats(0.0)] == [False, True]
    (mended,) = groups.leave(b"d")[0]
    assert mended.index == 0
    assert sorted(mended.ranks) == [b"b", b"c"]
    assert groups.leave(b"nobody") == ([], [])
    groups.join(b"e")
    assert groups.leave(b"e") == ([], [])
    assert groups.spares == []


def test_requests_are_parked_until_a_group_is_ready_and_then_placed_in_order_of_arrival() -> None:
    groups = make(max_num_seqs=1)
    groups.submit(PEER, request(1, [1, 2]), now=10.0)
    groups.submit(PEER, request(2, [1, 2], age=5.0), now=11.0)
    groups.submit(PEER, request(3, [1] * 128), now=12.0)
    groups.submit(PEER, request(4, [1]), now=13.0)
    groups.abort(PEER, [4, 99])
    assert len(groups.parked) == groups.num_waiting == 3
    replies = start(groups, b"a")
    assert [(peer, type(answer), answer.id) for peer, answer in replies] == [(PEER, Rejected, 3)]
    assert "128 tokens" in replies[0][1].message
    scheduler = groups.schedulers()[0]
    assert list(run(scheduler)) == [2, 1]
    assert groups.parked == {}


def test_a_refusal_names_the_kind() -> None:
    groups = make(max_waiting=2)
    start(groups, b"a")
    answer = groups.submit(PEER, request(1, [1] * 128), 0.0)
    assert isinstance(answer, Rejected)
    assert answer.kind == "invalid"
    for id in (2, 3):
        assert groups.submit(PEER, request(id, [1]), 0.0) is None
    answer = groups.submit(PEER, request(4, [1]), 0.0)
    assert isinstance(answer, Rejected)
    assert (answer.id, answer.kind) == (4, "overloaded")
    assert "2 requests are waiting" in answer.message
    assert groups.submit(PEER, request(5, [1], fork_of=2), 0.0) is None  # its leader is in
    assert groups.submit(PEER, request(6, [1], attempt=1), 0.0) is None  # was in before


def test_an_attempt_replaces_an_earlier_one_and_a_repetition_is_ignored() -> None:
    groups = make()
    start(groups, b"a")
    groups.submit(PEER, request(1, [1, 2], attempt=1), 0.0)
    scheduler = groups.schedulers()[0]
    first = scheduler.requests[PEER, 1]
    assert groups.submit(PEER, request(1, [1, 2]), 0.0) is None
    assert groups.submit(PEER, request(1, [1, 2], attempt=1), 0.0) is None
    assert scheduler.requests[PEER, 1] is first
    assert groups.submit(PEER, request(1, [1, 2], attempt=2), 0.0) is None
    assert first.finished
    assert scheduler.requests[PEER, 1].attempt == 2
    scheduler.check()


def test_the_cached_prefix_draws_and_the_load_pushes_away() -> None:
    groups = make()
    start(groups, b"a", b"b")
    shared = [i % VOCAB for i in range(100)]
    groups.submit(PEER, request(0, shared, max_tokens=1), 0.0)
    assert place_of(groups, 0) == 0
    run(groups.schedulers()[0])
    for id in range(1, 20):
        groups.submit(PEER, request(id, [*shared, 1, 2]), 0.0)
    places = [place_of(groups, id) for id in range(1, 20)]
    assert places[0] == 0  # with the cache
    assert places.count(1) >= 19 // 2 - 100 // REQUEST_COST  # not without bound
    groups.submit(PEER, request(50, [5, 5, 5]), 0.0)
    loads = [len(scheduler.requests) for scheduler in groups.schedulers()]
    assert abs(loads[0] - loads[1]) <= 100 // REQUEST_COST + 1


def test_equal_groups_take_turns() -> None:
    groups = make()
    start(groups, b"a", b"b", b"c")
    for id in range(9):
        groups.submit(PEER, request(id, [1 + id % 5] * 4), 0.0)
    assert [len(scheduler.requests) for scheduler in groups.schedulers()] == [3, 3, 3]


def test_samples_go_where_their_leader_is() -> None:
    groups = make()
    start(groups, b"a", b"b")
    groups.submit(PEER, request(0, [1] * 9), 0.0)
    groups.submit(PEER, request(1, [2] * 9), 0.0)
    for id in (2, 3, 4):
        groups.submit(PEER, request(id, [2] * 9, fork_of=1), 0.0)
    assert {place_of(groups, id) for id in (1, 2, 3, 4)} == {1}
    groups.submit(PEER, request(5, [2] * 9, fork_of=77), 0.0)
    assert place_of(groups, 5) == 0


def test_a_prompt_goes_to_a_group_that_can_hold_it() -> None:
    groups = make()
    start(groups, b"small", blocks=8)
    start(groups, b"large", blocks=64)
    groups.submit(PEER, request(0, [1] * 60), 0.0)
    assert place_of(groups, 0) == 1
    answer = groups.submit(PEER, request(1, [1] * 200), 0.0)
    assert isinstance(answer, Rejected)
    assert "at most 127" in answer.message


def test_a_new_group_shares_the_queue_of_the_others() -> None:
    groups = make(max_num_seqs=2)
    start(groups, b"a")
    for id in range(12):
        groups.submit(PEER, request(id, [id % VOCAB] * 5), 0.0)
    groups.submit(PEER, request(20, [1] * 5, fork_of=0), 0.0)
    groups.submit(PEER, request(21, [1] * 5, fork_of=11), 0.0)
    first = groups.schedulers()[0]
    first.schedule(0.0)
    start(groups, b"b")
    second = groups.schedulers()[1]
    assert first.num_running == 2
    assert len(first.requests) + len(second.requests) == 14
    assert len(second.requests) >= 5
    assert place_of(groups, 20) == 0  # waits for a leader that runs
    assert place_of(groups, 21) == place_of(groups, 11)
    first.check()
    second.check()


def test_a_death_moves_all_requests_ahead_of_newer_work() -> None:
    groups = make(max_num_seqs=1)
    start(groups, b"a", b"b")
    for id in range(6):
        groups.submit(PEER, request(id, [id % VOCAB] * 3, max_tokens=2), float(id))
    groups.leave(b"a")
    (left,) = groups.schedulers()
    assert len(left.requests) == 6
    assert list(run(left)) == [0, 1, 2, 3, 4, 5]


def test_a_request_that_kills_workers_ends_with_an_error_and_the_rest_are_parked() -> None:
    groups = make(max_num_seqs=1)
    groups.submit(PEER, request(1, [1] * 5), 0.0)
    groups.submit(PEER, request(2, [2] * 5), 1.0)
    replies: Replies = []
    for _ in range(MAX_CRASHES):
        assert replies == []
        start(groups, b"a")
        groups.schedulers()[0].schedule(0.0)
        replies = groups.leave(b"a")[1]
    ((peer, answer),) = replies
    assert isinstance(answer, Delta)
    assert (peer, answer.id, answer.finish) == (PEER, 1, "error")
    assert list(groups.parked) == [(PEER, 2)]


def test_a_lost_api_process_takes_its_requests_along() -> None:
    groups = make()
    groups.submit(b"gone", request(9, [1]), 0.0)
    groups.drop_peer(b"gone")
    assert groups.parked == {}
    start(groups, b"a", b"b")
    for id in range(4):
        groups.submit(b"gone", request(id, [1] * 5), 0.0)
        groups.submit(PEER, request(id, [1] * 5), 0.0)
    groups.drop_peer(b"gone")
    assert all(place_of(groups, id, b"gone") < 0 <= place_of(groups, id) for id in range(4))
    for scheduler in groups.schedulers():
        scheduler.check()


def test_counters_outlive_the_workers() -> None:
    groups = make()
    start(groups, b"a")
    groups.submit(PEER, request(1, [1] * 5), 0.0)
    run(groups.schedulers()[0])
    before = groups.stats(0.0)[0]
    assert before.ready
    assert before.prompt_tokens == 5
    groups.leave(b"a")
    without = groups.stats(0.0)[0]
    assert (without.ready, without.num_blocks) == (False, 0)
    assert without.generation_tokens == before.generation_tokens > 0
    start(groups, b"b")
    assert groups.stats(0.0)[0].steps == before.steps


class GroupsMachine(RuleBasedStateMachine):
    """Workers and requests come and go; in the end every request has the output it has alone."""

    @initialize(world_size=st.integers(1, 2))
    def begin(self, world_size: int) -> None:
        self.groups = make(world_size, max_num_seqs=3, max_num_batched_tokens=16)
        self.models: dict[int, PagedModel] = {}  # by epoch
        self.plans: dict[int, list[Plan]] = {}
        self.sent: dict[int, Request] = {}
        self.outputs: dict[int, list[int]] = {}
        self.last: dict[int, Delta] = {}
        self.workers = 0

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            assert delta.index == len(self.outputs[delta.id])
            assert delta.id not in self.last
            self.outputs[delta.id] += delta.ids
            if delta.finish:
                self.last[delta.id] = delta

    def tell(self, replies: Replies) -> None:
        self.take([answer for _, answer in replies if isinstance(answer, Delta)])
        assert all(isinstance(answer, Delta) for _, answer in replies)

    @rule()
    def join(self) -> None:
        self.workers += 1
        self.groups.join(b"w%d" % self.workers)

    @precondition(lambda self: any(len(g.blocks) < len(g.ranks) for g in self.groups.groups))
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        loading = [(w, g) for g in self.groups.groups for w in g.ranks if w not in g.blocks]
        worker, group = data.draw(st.sampled_from(loading))
        self.get_ready(worker, group)

    def get_ready(self, worker: bytes, group: Group) -> None:
        ready, replies = self.groups.ready(worker, group.epoch, 32)
        self.tell(replies)
        if ready is not None:
            self.models[ready.epoch] = PagedModel(32, 4, 3)
            self.plans[ready.epoch] = []

    @precondition(lambda self: any(g.ranks for g in self.groups.groups))
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([w for g in self.groups.groups for w in g.ranks]))
        self.tell(self.groups.leave(worker)[1])

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        samples=st.integers(1, 3),
        max_tokens=st.integers(1, 12),
    )
    def submit(self, tokens: list[int], samples: int, max_tokens: int) -> None:
        leader = -1
        for _ in range(samples):
            id = len(self.sent)
            self.sent[id] = request(id, tokens, fork_of=leader, max_tokens=max_tokens)
            self.outputs[id] = []
            assert self.groups.submit(PEER, self.sent[id], float(id)) is None
            leader = id if leader < 0 else leader

    @precondition(lambda self: self.outputs)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.outputs)))
        self.groups.abort(PEER, [id])
        if id not in self.last:
            del self.outputs[id]

    @rule()
    def work(self) -> None:
        self.step()

    def step(self) -> bool:
        busy = False
        for scheduler in self.groups.schedulers():
            plans = self.plans[scheduler.epoch]
            if (plan := scheduler.schedule(0.0)) is not None:
                plans.append(plan)
                busy = True
            if len(plans) == 2 or (plan is None and plans):
                done = plans.pop(0)
                for items in scheduler.update(done.step, self.models[scheduler.epoch].run(done)).values():
                    self.take(items)
                busy = True
        return busy

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "groups"):
            for scheduler in self.groups.schedulers():
                scheduler.check()
            assert len(self.groups.spares) < self.groups.world_size

    def teardown(self) -> None:
        if not hasattr(self, "groups"):
            return
        while not self.groups.groups or not self.groups.groups[0].ranks:
            self.join()
        for group in self.groups.groups:
            for worker in group.ranks:
                self.get_ready(worker, group)
        assert any(not self.step() for _ in range(5000)), "it never ends"
        assert not self.groups.parked
        assert not any(scheduler.requests for scheduler in self.groups.schedulers())
        for id, output in self.outputs.items():
            if self.last[id].finish != "error":
                assert (output, self.last[id].finish) == generate_alone(self.sent[id], 128)[:2]


TestRandom = GroupsMachine.TestCase
TestRandom.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_epochs_never_repeat(world_size: int) -> None:
    groups = make(world_size)
    seen: list[int] = []
    for i in range(10):
        seen += [group.epoch for group in groups.join(b"%d" % i)]
        if i % 3 == 2:
            seen += [group.epoch for group in groups.leave(b"%d" % (i - 2))[0]]
    assert len(set(seen)) == len(seen) > 0
    assert seen == sorted(seen)
