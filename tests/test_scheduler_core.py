"""The scheduler core against a worker that proves every cached token, in random and in chosen situations."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.core import MAX_BYPASS, MAX_CRASHES, Scheduler
from services.scheduler.request import Sequence
from shared.config import EngineConfig
from shared.errors import RequestError
from shared.messages import Delta, Plan, Request, pack_ids
from shared.sampling import SamplingParams
from tests.paged_model import EOS, VOCAB, PagedModel, generate_alone

PEER = b"api"


class Engine:
    """A scheduler and its worker in one thread, with the journal that an api process would keep."""

    def __init__(self, num_blocks: int = 64, max_model_len: int = 256, block_size: int = 4, **flags: object) -> None:
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
        assert len(scheduler.waiting) == scheduler.waiting.tokens == 0
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
    )
    def start(
        self, num_blocks: int, block_size: int, max_num_seqs: int, budget: int, chunked: bool, caching: bool
    ) -> None:
        self.engine = Engine(
            num_blocks,
            max_model_len=40,
            block_size=block_size,
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
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
