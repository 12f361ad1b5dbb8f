"""The scheduler core against a worker that proves every cached token, in random and in chosen situations."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.admission import LOOKAHEAD, MAX_BYPASS
from services.scheduler.core import MAX_CRASHES, Scheduler
from services.scheduler.policy import PeakEstimate
from services.scheduler.request import Sequence
from shared.config import EngineConfig
from shared.errors import RequestError
from shared.messages import Delta, Plan, Request, pack_ids
from shared.sampling import SamplingParams
from tests.paged_model import EOS, VOCAB, PagedModel, generate_alone

PEER = b"api"


class Hopeful(PeakEstimate):
    """Never expects anyone to grow, so that preemption is no longer rare."""

    def fits(self, seq: Sequence, free: int) -> bool:
        return True


class Engine:
    """A scheduler and its worker in one thread, with the journal that an api process would keep."""

    def __init__(
        self,
        num_blocks: int = 64,
        max_model_len: int = 256,
        block_size: int = 4,
        hopeful: bool = False,
        **flags: object,
    ) -> None:
        self.hopeful = hopeful
        self.config = EngineConfig(block_size=block_size, **flags)  # type: ignore[arg-type]
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.now = 0.0
        self.serial = 0
        self.sent: dict[int, Request] = {}
        self.outputs: dict[int, list[int]] = {}
        self.last: dict[int, Delta] = {}
        self.cached: dict[int, int] = {}
        self.first_step: dict[int, int] = {}
        self.start()

    def start(self) -> None:
        self.scheduler = Scheduler(self.config, self.num_blocks, self.max_model_len, [EOS])
        if self.hopeful:
            self.scheduler.admission.estimate = Hopeful(self.config.block_size)
        self.model = PagedModel(self.num_blocks, self.config.block_size, self.config.max_num_seqs)
        self.plans: deque[Plan] = deque()  # sent, not yet executed
        self.results: deque[tuple[int, list[int]]] = deque()  # executed, not yet applied

    @property
    def max_len(self) -> int:
        return self.scheduler.limits.max_len

    def request(self, prompt: Iterable[int], *, fork_of: int = -1, salt: str = "", **params: object) -> Request:
        id = len(self.sent)
        params = {"max_tokens": 8, "seed": id, **params}
        request = Request(
            id,
            0,
            pack_ids(prompt),
            SamplingParams(**params),
            fork_of=fork_of,
            cache_salt=salt,  # type: ignore[arg-type]
        )
        self.sent[id] = request
        return request

    def add(self, prompt: Iterable[int], **options: object) -> int:
        request = self.request(prompt, **options)  # type: ignore[arg-type]
        self.outputs[request.id] = []
        self.submit(request)
        return request.id

    def submit(self, request: Request) -> None:
        self.serial += 1
        delta = self.scheduler.add(Sequence(PEER, request, self.now, self.serial))
        if delta is not None:
            self.take([delta])

    def take(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            output = self.outputs[delta.id]
            assert delta.id not in self.last, "a delta after the last"
            assert delta.index == len(output)
            assert (delta.cached >= 0) <= (delta.id not in self.cached) or delta.attempt
            if delta.cached >= 0:
                self.cached[delta.id] = delta.cached
            self.first_step.setdefault(delta.id, self.scheduler.counters.steps)
            output += delta.ids
            if delta.finish:
                self.last[delta.id] = delta

    def schedule(self) -> Plan | None:
        self.now += 0.01
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            assert sum(plan.counts) <= self.scheduler.budget + (
                0 if self.scheduler.chunked else self.config.max_num_seqs
            )
            self.plans.append(plan)
        return plan

    def execute(self) -> None:
        plan = self.plans.popleft()
        self.results.append((plan.step, self.model.run(plan)))

    def deliver(self) -> None:
        for deltas in self.scheduler.update(*self.results.popleft()).values():
            self.take(deltas)

    def step(self) -> bool:
        """One turn of the loop with two plans in flight; False when idle."""
        while self.schedule() is not None:
            pass
        if self.plans:
            self.execute()
        if not self.results:
            return False
        self.deliver()
        self.scheduler.check()
        return True

    def run(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.step():
                break
        else:
            raise AssertionError("it never ends")
        self.assert_idle()

    def assert_idle(self) -> None:
        scheduler = self.scheduler
        assert not scheduler.has_work()
        assert scheduler.num_running == scheduler.num_waiting == 0
        assert scheduler.space.pool.num_referenced == 0
        assert len(scheduler.admission.waiting) == scheduler.queued_tokens == 0
        scheduler.check()

    def assert_right(self, ids: Iterable[int] | None = None) -> None:
        for id in self.outputs if ids is None else ids:
            expected, finish, stop_token = generate_alone(self.sent[id], self.max_len)
            assert self.outputs[id] == expected
            assert (self.last[id].finish, self.last[id].stop_token) == (finish, stop_token)

    def die(self) -> None:
        """The worker dies; its requests go to a new one."""
        back, deltas = self.scheduler.evict_all()
        for items in deltas.values():
            self.take(items)
        self.start()
        for seq in back:
            delta = self.scheduler.add(seq)
            if delta is not None:
                self.take([delta])

    def restart(self) -> None:
        """The scheduler dies; a new one gets the journals."""
        self.start()
        self.cached.clear()
        for id, request in list(self.sent.items()):
            if id in self.outputs and id not in self.last:
                again = Request(
                    id,
                    request.attempt + 1,
                    request.prompt,
                    request.params,
                    pack_ids(self.outputs[id]),
                    request.fork_of,
                    age=self.now,
                    cache_salt=request.cache_salt,
                )
                self.sent[id] = again
                self.submit(again)

    def abort(self, id: int) -> None:
        assert self.scheduler.abort((PEER, id))
        del self.outputs[id]


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, aborts, deaths and late results in any order; every stream must come out as if it had been alone."""

    @initialize(
        num_blocks=st.integers(4, 24),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 20),
        chunked=st.booleans(),
        caching=st.booleans(),
        hopeful=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        chunked: bool,
        caching: bool,
        hopeful: bool,
    ) -> None:
        self.engine = Engine(
            num_blocks,
            max_model_len=40,
            block_size=block_size,
            hopeful=hopeful,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_chunked_prefill=chunked,
            enable_prefix_caching=caching,
        )
        self.crash_ended = 0

    @rule(
        prefix=st.integers(0, 14),
        which=st.integers(0, 1),
        own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
        samples=st.integers(1, 3),
        max_tokens=st.one_of(st.none(), st.integers(1, 20)),
        min_tokens=st.integers(0, 3),
        stops=st.lists(st.integers(0, VOCAB - 1), max_size=1),
        ignore_eos=st.booleans(),
        salt=st.sampled_from(["", "", "other"]),
    )
    def arrive(
        self,
        prefix: int,
        which: int,
        own: list[int],
        samples: int,
        max_tokens: int | None,
        min_tokens: int,
        stops: list[int],
        ignore_eos: bool,
        salt: str,
    ) -> None:
        tokens = prompt(prefix, which) + own
        if len(tokens) >= self.engine.max_len:
            with pytest.raises(RequestError, match=f"has {len(tokens)} tokens"):
                self.engine.scheduler.add(Sequence(PEER, Request(-2, 0, pack_ids(tokens), SamplingParams()), 0, 0))
            return
        leader = -1
        for _ in range(samples):
            id = self.engine.add(
                tokens,
                fork_of=leader,
                salt=salt,
                max_tokens=max_tokens,
                min_tokens=min(min_tokens, max_tokens or 3),
                stop_token_ids=stops,
                ignore_eos=ignore_eos,
            )
            leader = id if leader < 0 else leader

    @rule()
    def schedule(self) -> None:
        self.engine.schedule()

    @precondition(lambda self: self.engine.plans)
    @rule()
    def execute(self) -> None:
        self.engine.execute()

    @precondition(lambda self: self.engine.results)
    @rule()
    def deliver(self) -> None:
        self.engine.deliver()

    @rule(steps=st.integers(1, 10))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    @precondition(lambda self: self.engine.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        keys = sorted(self.engine.scheduler.requests)
        self.engine.abort(data.draw(st.sampled_from(keys))[1])

    @precondition(lambda self: self.engine.scheduler.requests)
    @rule()
    def worker_dies(self) -> None:
        self.engine.die()

    @precondition(lambda self: self.engine.scheduler.requests)
    @rule()
    def scheduler_dies(self) -> None:
        self.engine.restart()

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        while engine.plans or engine.results:
            engine.execute() if engine.plans else engine.deliver()
        engine.run()
        errors = {id for id, delta in engine.last.items() if delta.finish == "error"}
        assert all("worker died" in engine.last[id].message for id in errors)
        engine.assert_right(engine.outputs.keys() - errors)


TestRandom = SchedulerMachine.TestCase
TestRandom.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


# Case I1: cold and warm answers are equal, and what was cached is reported to the token.


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 64, 65])
def test_second_run_of_a_prompt_computes_only_its_last_token(length: int) -> None:
    engine = Engine(block_size=16)
    ids = []
    for _ in range(3):
        ids.append(engine.add(prompt(length), seed=5, max_tokens=40, ignore_eos=True))
        engine.run()
    assert [engine.cached[id] for id in ids] == [0, length - 1, length - 1]
    engine.assert_right()
    counters = engine.scheduler.counters
    assert (counters.prefix_queries, counters.prefix_hits) == (3 * length, 2 * (length - 1))
    assert counters.prompt_tokens == 3 * length
    assert counters.generation_tokens == sum(map(len, engine.outputs.values()))


def test_prompts_that_part_within_a_block_share_up_to_there_and_a_reply_is_cached_for_the_next_turn() -> None:
    engine = Engine(block_size=16)
    first = prompt(40)
    engine.add(first, ignore_eos=True, max_tokens=40)
    engine.run()
    other = [*first[:37], (first[37] + 1) % VOCAB, *prompt(10, seed=1)]
    parted = engine.add(other)
    engine.run()
    turn = first + engine.outputs[0]
    second = engine.add([*turn, 1, 2, 3])
    engine.run()
    assert engine.cached[parted] == 37
    assert engine.cached[second] == 64  # the full blocks of the 79 computed tokens
    engine.assert_right()


def test_without_prefix_caching_nothing_is_reused_and_nothing_counted() -> None:
    engine = Engine(enable_prefix_caching=False)
    for _ in range(2):
        engine.add(prompt(20), seed=1)
        engine.run()
    assert engine.cached == {0: 0, 1: 0}
    assert engine.scheduler.counters.prefix_queries == 0
    assert engine.scheduler.space.pool.num_free == 64
    engine.assert_right()


def test_a_salt_keeps_caches_apart() -> None:
    engine = Engine()
    for salt in ("", "a", "b", "a", ""):
        engine.add(prompt(20), salt=salt)
        engine.run()
    assert list(engine.cached.values()) == [0, 0, 0, 19, 19]
    engine.assert_right()


@pytest.mark.parametrize("budget", [2048, 256, 64])
def test_a_burst_with_one_beginning_computes_it_once(budget: int) -> None:
    engine = Engine(num_blocks=600, block_size=16, max_model_len=1200, max_num_batched_tokens=budget)
    shared = prompt(1000, seed=1)
    for i in range(16):
        engine.add([*shared, *prompt(50, seed=10 + i)], max_tokens=4, ignore_eos=True)
    engine.run()
    assert engine.scheduler.counters.step_tokens < 1000 + 16 * (50 + 4) + 16 * 16
    engine.assert_right()


def test_a_burst_of_equal_prompts_with_different_salts_starts_at_once() -> None:
    engine = Engine()
    for salt in "abc":
        engine.add(prompt(20), salt=salt)
    plan = engine.schedule()
    assert plan is not None
    assert plan.counts == [20] * 3
    engine.run()
    engine.assert_right()


def test_an_output_is_cached_while_it_is_still_being_written() -> None:
    engine = Engine()
    first = engine.add(prompt(5), max_tokens=60, ignore_eos=True)
    while len(engine.outputs[first]) < 30:
        engine.step()
    second = engine.add([*prompt(5), *engine.outputs[first]])
    while second not in engine.first_step:
        engine.step()
    assert first not in engine.last
    assert engine.cached[second] >= 30
    engine.run()
    engine.assert_right()


def test_equal_prompts_shorter_than_a_block_start_at_once() -> None:
    engine = Engine(block_size=16)
    for _ in range(5):
        engine.add(prompt(10))
    plan = engine.schedule()
    assert plan is not None
    assert plan.counts == [10] * 5
    engine.run()
    engine.assert_right()


# Case J1: larger than the pool.


def pool_engine() -> Engine:
    return Engine(num_blocks=32, block_size=16, max_model_len=2048)


def test_a_prompt_larger_than_the_pool_is_refused_with_the_numbers() -> None:
    engine = pool_engine()
    with pytest.raises(RequestError, match=r"600 tokens.*KV cache holds at most 511"):
        engine.add(prompt(600))
    with pytest.raises(RequestError, match=r"512 tokens"):
        engine.add(prompt(512))
    assert not engine.scheduler.has_work()


def test_a_prompt_over_the_model_length_is_refused_with_the_numbers() -> None:
    engine = Engine(num_blocks=1000, max_model_len=64)
    with pytest.raises(RequestError, match=r"64 tokens.*model takes at most 63"):
        engine.add(prompt(64))


def test_growth_over_the_pool_ends_with_length_and_the_short_ones_behind_it_finish() -> None:
    engine = pool_engine()
    long = engine.add(prompt(400), max_tokens=400, ignore_eos=True)
    short = [engine.add(prompt(20, seed=i), max_tokens=10, ignore_eos=True) for i in range(10)]
    engine.run()
    assert engine.last[long].finish == "length"
    assert len(engine.outputs[long]) == 512 - 400
    assert all(len(engine.outputs[id]) == 10 for id in short)
    engine.assert_right()


def test_a_prompt_that_fills_the_pool_is_admitted_though_a_copy_would_need_one_block_more() -> None:
    engine = Engine(num_blocks=4, block_size=4, max_model_len=64)
    tokens = prompt(15)
    engine.add(tokens, max_tokens=1)
    engine.run()
    again = engine.add([*tokens[:10], (tokens[10] + 1) % VOCAB, *tokens[11:]], max_tokens=1)
    engine.run()
    assert engine.cached[again] == 8
    engine.assert_right()


def test_the_source_of_a_copy_is_not_given_away_in_the_same_plan() -> None:
    engine = Engine(num_blocks=4, block_size=4, hopeful=True)
    for first in (1, 2):
        engine.add([first] * 5, max_tokens=1)
        engine.run()
    one = engine.add([1, 1, 1, 3, 3, 3, 3, 3], max_tokens=1)
    two = engine.add([2, 2, 2, 4], max_tokens=1)
    plan = engine.schedule()
    assert plan is not None
    assert len(plan.admit) == 2
    assert len(plan.copies) == 2  # the second has no room for a copy
    engine.run()
    assert (engine.cached[one], engine.cached[two]) == (3, 0)
    engine.assert_right()


# Case J5: the result does not depend on the budget.


@pytest.mark.parametrize(
    "flags", [{"max_num_batched_tokens": n} for n in (1, 3, 16, 17, 64)] + [{"enable_chunked_prefill": False}]
)
def test_output_does_not_depend_on_the_budget(flags: dict[str, object]) -> None:
    engine = Engine(num_blocks=300, block_size=16, max_model_len=600, **flags)
    decoding = [engine.add(prompt(5, seed=9), max_tokens=30) for _ in range(3)]
    for _ in range(4):
        engine.step()
    for length in (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500):
        engine.add(prompt(length), max_tokens=6)  # each begins like the next longer one
        engine.step()
    engine.run()
    assert len(engine.outputs) == len(decoding) + 11
    engine.assert_right()


def test_a_budget_below_the_number_of_running_requests_makes_progress_for_all() -> None:
    engine = Engine(num_blocks=200, max_num_batched_tokens=3, max_num_seqs=16)
    ids = [engine.add(prompt(5, seed=i), max_tokens=5, ignore_eos=True) for i in range(10)]
    engine.run()
    assert all(len(engine.outputs[id]) == 5 for id in ids)


def test_whole_prompts_are_computed_in_one_step_when_chunking_is_off() -> None:
    engine = Engine(max_model_len=50, max_num_batched_tokens=8, enable_chunked_prefill=False, num_blocks=400)
    engine.add(prompt(3), max_tokens=30, ignore_eos=True)
    engine.step()
    for seed in range(4):
        engine.add(prompt(40, seed), max_tokens=2, ignore_eos=True)
    prefills = []
    while (plan := engine.schedule()) is not None or engine.plans:
        prefills += [count for count in (plan.counts if plan else []) if count > 1]
        engine.execute()
        engine.deliver()
    assert len(prefills) == 4
    assert min(prefills) > 30  # whole, but for what was cached by chance
    engine.assert_right()


# Case J6: one long prompt among short ones.


def test_decodes_go_on_and_short_prompts_start_beside_a_long_one() -> None:
    engine = Engine(num_blocks=1000, block_size=16, max_model_len=8192, max_num_batched_tokens=256)
    streams = [engine.add(prompt(20, seed=i), max_tokens=200, ignore_eos=True) for i in range(4)]
    for _ in range(10):
        engine.step()
    long = engine.add(prompt(4000, seed=10), max_tokens=5, ignore_eos=True)
    engine.step()
    shorts = []
    while long not in engine.first_step:
        before = [len(engine.outputs[id]) for id in streams]
        if len(shorts) < 8:
            shorts.append(engine.add(prompt(40, seed=20 + len(shorts)), max_tokens=5, ignore_eos=True))
        engine.step()
        assert [len(engine.outputs[id]) for id in streams] == [n + 1 for n in before]
    assert len(shorts) == 8
    assert all(engine.first_step[id] < engine.first_step[long] for id in shorts)
    engine.run()
    engine.assert_right()


def test_short_prompts_start_behind_several_long_ones() -> None:
    engine = Engine(num_blocks=2000, block_size=16, max_model_len=8192, max_num_batched_tokens=256)
    longs = [engine.add(prompt(4000, seed=i), max_tokens=2) for i in range(4)]
    shorts = [engine.add(prompt(40, seed=10 + i), max_tokens=2) for i in range(8)]
    engine.run()
    assert max(engine.first_step[id] for id in shorts) < min(engine.first_step[id] for id in longs)
    assert [engine.first_step[id] for id in longs] == sorted(engine.first_step[id] for id in longs)


def test_a_request_that_does_not_fit_is_passed_by_small_ones_but_not_for_ever() -> None:
    engine = Engine(num_blocks=32, block_size=4, max_model_len=128, max_num_seqs=4)
    engine.add(prompt(20, seed=1), max_tokens=100, ignore_eos=True)
    engine.step()
    large = engine.add(prompt(50, seed=2), max_tokens=60, ignore_eos=True)
    small = [engine.add(prompt(3, seed=i), max_tokens=1) for i in range(3, 3 + MAX_BYPASS * 3)]
    while large not in engine.first_step:
        engine.step()
    passed = sum(id in engine.last for id in small)
    assert MAX_BYPASS <= passed < MAX_BYPASS + LOOKAHEAD
    engine.run()
    engine.assert_right()


# Case K1: aborts.


def test_hundreds_of_aborted_streams_leave_nothing_behind() -> None:
    engine = Engine(num_blocks=120, max_num_seqs=8)
    rng = random.Random(1)
    live: list[int] = []
    for i in range(500):
        live.append(engine.add(prompt(rng.randrange(1, 40), seed=i % 7), max_tokens=100))
        engine.step()
        if len(live) == 12:
            victim = live.pop(rng.randrange(12))
            if victim not in engine.last:
                engine.abort(victim)
                engine.scheduler.check()
    for id in live:
        if id not in engine.last:
            engine.abort(id)
    assert engine.scheduler.space.pool.num_referenced == 0
    engine.run()
    after = [engine.add(prompt(20, seed=i)) for i in range(20)]
    engine.run()
    engine.assert_right(after)


def test_an_abort_frees_at_once_and_the_next_plan_releases_the_slot() -> None:
    engine = Engine(max_num_seqs=1)
    first = engine.add(prompt(10), max_tokens=50)
    second = engine.add(prompt(12, seed=1))
    engine.schedule()
    engine.abort(first)
    assert engine.scheduler.space.pool.num_referenced == 0
    plan = engine.schedule()
    assert plan is not None
    assert plan.release == [0]
    assert [admit.slot for admit in plan.admit] == [0]
    engine.run()
    engine.assert_right([second])
    assert not engine.scheduler.abort((PEER, first))


# Case Q3 and preemption.


def tight_engine(hopeful: bool = False) -> Engine:
    return Engine(num_blocks=20, block_size=4, max_num_seqs=8, hopeful=hopeful)


def test_recomputing_after_preemption_is_no_hit() -> None:
    engine = tight_engine(hopeful=True)
    for i in range(8):
        engine.add(
            [i % VOCAB, (i * i) % VOCAB, *prompt(9, seed=100 + i)], max_tokens=40, ignore_eos=False, min_tokens=40
        )
    engine.run()
    counters = engine.scheduler.counters
    assert counters.preemptions > 0
    assert counters.prefix_queries == 8 * 11
    partial = sum(engine.cached.values())
    assert counters.prefix_hits == partial <= 8 * 3  # chance overlaps of short beginnings
    hits = counters.prefix_hits
    for _ in range(10):
        engine.add(prompt(33, seed=1000), max_tokens=1)
        engine.run()
    assert counters.prefix_hits - hits >= 9 * 32
    engine.assert_right()


def test_preemption_is_rare_when_the_lengths_are_known() -> None:
    engine = tight_engine()
    for i in range(30):
        engine.add(prompt(10, seed=i), max_tokens=30, ignore_eos=True)
    engine.run()
    assert engine.scheduler.counters.preemptions == 0
    assert engine.scheduler.counters.steps < 30 * 30
    engine.assert_right()


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_with_one_or_two_plans_in_flight(depth: int) -> None:
    engine = Engine(num_blocks=8, block_size=4, max_num_seqs=6, hopeful=True)
    for i in range(6):
        engine.add(prompt(6, seed=i), max_tokens=20, min_tokens=15)
    while engine.scheduler.has_work():
        while len(engine.plans) + len(engine.results) < depth and engine.schedule() is not None:
            pass
        engine.execute()
        engine.deliver()
        engine.scheduler.check()
    assert engine.scheduler.counters.preemptions > 0
    engine.assert_idle()
    engine.assert_right()


def test_the_latest_arrival_is_preempted() -> None:
    engine = Engine(num_blocks=6, block_size=4, max_model_len=64, hopeful=True)
    first = engine.add(prompt(8), max_tokens=16, min_tokens=16)
    second = engine.add(prompt(8, seed=1), max_tokens=12, min_tokens=12)
    engine.run()
    assert engine.scheduler.counters.preemptions >= 1
    assert list(engine.last) == [first, second]
    engine.assert_right()


# Samples of one prompt.


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 30])
@pytest.mark.parametrize("caching", [True, False])
def test_samples_share_the_blocks_of_the_prompt(length: int, caching: bool) -> None:
    engine = Engine(enable_prefix_caching=caching)
    leader = engine.add(prompt(length), max_tokens=20, ignore_eos=True)
    for _ in range(3):
        engine.add(prompt(length), fork_of=leader, max_tokens=20, ignore_eos=True)
    while len(engine.first_step) < 4:
        engine.step()
    counters = engine.scheduler.counters
    assert counters.step_tokens <= length + 3 + 4 * max(map(len, engine.outputs.values())) + 8
    shared = (length - 1) // 4
    tables = [seq.blocks for seq in engine.scheduler.running]
    assert all(table[:shared] == tables[0][:shared] for table in tables)
    assert len({table[shared] for table in tables}) == 4
    engine.run()
    engine.assert_right()
    assert counters.prompt_tokens == length
    assert list(engine.cached.values()) == [0, 0, 0, 0]
    assert counters.prefix_hits == 0


def test_a_late_sample_starts_at_once() -> None:
    engine = Engine(enable_prefix_caching=False)
    leader = engine.add(prompt(10), max_tokens=100, ignore_eos=True)
    while leader not in engine.first_step:
        engine.step()
    fork = engine.add(prompt(10), fork_of=leader, max_tokens=3)
    engine.schedule() or engine.step()
    plan = engine.plans[-1] if engine.plans else engine.schedule()
    assert plan is not None
    assert [admit.num_prompt for admit in plan.admit] == [10]
    assert plan.counts[-1] == 1  # all but the last token of the prompt is shared
    engine.run()
    engine.assert_right()
    assert list(engine.last) == [fork, leader]


def test_samples_go_on_without_their_leader() -> None:
    for leave in ("abort", "absent", "other prompt", "finished"):
        engine = Engine()
        leader = engine.add(prompt(10, seed=leave == "other prompt"), max_tokens=1 if leave == "finished" else 9)
        fork = engine.add(prompt(10), fork_of=77 if leave == "absent" else leader)
        ended = engine.add(prompt(10), fork_of=leader)
        if leave == "abort":
            engine.schedule()
            engine.abort(ended)
            engine.abort(leader)
        engine.run()
        engine.assert_right()
        assert fork in engine.last


# Ends.


def test_the_stop_token_is_reported_and_the_eos_is_not() -> None:
    engine = Engine()
    request = engine.request(prompt(5), max_tokens=100)
    output, finish, _ = generate_alone(request, 256)
    assert finish == "stop"
    assert output[-1] == EOS
    plain = engine.add(prompt(5), seed=request.params.seed, max_tokens=100)
    token = output[0]
    stopped = engine.add(prompt(5), seed=request.params.seed, max_tokens=100, stop_token_ids=[token])
    ignoring = engine.add(
        prompt(5), seed=request.params.seed, max_tokens=100, ignore_eos=True, stop_token_ids=[EOS], min_tokens=1
    )
    engine.run()
    assert engine.outputs[plain] == output
    assert engine.last[plain].stop_token == -1
    assert engine.outputs[stopped] == [token]
    assert engine.last[stopped].stop_token == token
    assert engine.last[ignoring].stop_token == EOS


def test_the_row_after_the_last_token_is_not_computed() -> None:
    engine = Engine()
    engine.add(prompt(6), max_tokens=4, ignore_eos=True)
    engine.run()
    assert engine.scheduler.counters.step_tokens == 6 + 3
    assert engine.scheduler.counters.steps == 4


def test_nonsense_from_the_model_ends_that_request_only_and_is_not_reused() -> None:
    engine = Engine()
    bad = engine.add(prompt(9), max_tokens=9, ignore_eos=True)
    good = engine.add(prompt(9, seed=3), max_tokens=9, ignore_eos=True)
    while bad not in engine.first_step:
        engine.step()
    while not engine.results:
        engine.schedule()
        engine.execute()
    step, tokens = engine.results.popleft()
    engine.results.appendleft((step, [-1, *tokens[1:]]))
    engine.deliver()
    assert engine.last[bad].finish == "error"
    assert "no valid probabilities" in engine.last[bad].message
    engine.run()
    engine.assert_right([good])
    again = engine.add(prompt(9))
    engine.run()
    assert engine.cached[again] == 0
    engine.assert_right([good, again])


def test_a_request_that_kills_the_worker_again_and_again_ends_with_an_error() -> None:
    engine = Engine()
    poison = engine.add(prompt(9))
    engine.schedule()
    for _ in range(MAX_CRASHES - 1):
        engine.die()
        bystander = engine.add(prompt(5, seed=1))  # not yet in flight when the worker dies
        engine.schedule() if poison not in engine.last else None
    engine.die()
    assert engine.last[poison].finish == "error"
    assert "worker died" in engine.last[poison].message
    engine.run()
    engine.assert_right([bystander])


def test_a_token_clears_the_count_of_crashes() -> None:
    engine = Engine()
    id = engine.add(prompt(9), max_tokens=40, ignore_eos=True)
    for _ in range(3 * MAX_CRASHES):
        engine.step()
        engine.step()
        engine.die()
    engine.run()
    engine.assert_right([id])


def test_a_result_that_is_not_due_is_refused() -> None:
    engine = Engine()
    with pytest.raises(ValueError, match="not the result that is due"):
        engine.scheduler.update(1, [])
    engine.add(prompt(5))
    plan = engine.schedule()
    assert plan is not None
    for step, tokens in ((plan.step + 1, [1]), (plan.step, []), (plan.step, [1, 1])):
        with pytest.raises(ValueError, match="not the result that is due"):
            engine.scheduler.update(step, tokens)
    engine.run()
    engine.assert_right()


def test_a_resubmission_with_nothing_left_to_generate_ends_at_once() -> None:
    engine = Engine()
    request = engine.request(prompt(5), max_tokens=3, ignore_eos=True)
    engine.outputs[request.id] = [1, 2, 3]
    engine.submit(Request(request.id, 1, request.prompt, request.params, pack_ids([1, 2, 3])))
    assert engine.last[request.id] == Delta(request.id, 1, 3, [], "length")
    assert not engine.scheduler.has_work()


def test_a_sequence_that_outgrew_a_smaller_pool_ends_with_length() -> None:
    engine = Engine(num_blocks=2, block_size=4)
    request = engine.request(prompt(9), max_tokens=30, ignore_eos=True)
    engine.outputs[request.id] = [1]
    engine.submit(Request(request.id, 1, request.prompt, request.params, pack_ids([1])))
    assert engine.last[request.id].finish == "length"


def test_statistics() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add(prompt(10))
    engine.add(prompt(10, seed=1))
    engine.schedule()
    assert [repr(seq) for seq in engine.scheduler.running] == ["Sequence(0, RUNNING, 10/11 of 18)"]
    stats = engine.scheduler.stats(3, engine.now + 2.0)
    assert (stats.group, stats.ready, stats.running, stats.waiting) == (3, True, 1, 1)
    assert (stats.num_blocks, stats.block_size, stats.kv_usage) == (64, 4, 3 / 64)
    assert stats.stalled == pytest.approx(2.0)
    assert (stats.steps, stats.step_tokens) == (1, 10)
    engine.run()
    stats = engine.scheduler.stats(3, engine.now)
    assert (stats.running, stats.waiting, stats.kv_usage, stats.stalled) == (0, 0, 0.0, 0.0)
    assert stats.generation_tokens == sum(map(len, engine.outputs.values()))


def test_waiting_for_a_plan_counts_only_while_there_was_work() -> None:
    scheduler = Scheduler(EngineConfig(), 100, 100, [EOS])
    for id in range(2):  # the second comes when the worker has long been without work
        scheduler.add(Sequence(PEER, Request(id, 0, pack_ids([5]), SamplingParams(max_tokens=3, seed=1)), 0.0, id))
        while scheduler.requests:
            plan = scheduler.schedule(0.0)
            assert plan is not None
            scheduler.update(plan.step, [7], seconds=1.0, idle=0.25 if plan.starts != [0] else 60.0)
    assert scheduler.stats(0, 0.0).idle == 4 * 0.25
