"""The model of step times: it learns, and the chunks it gives keep a step within its time."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core import Scheduler
from services.scheduler.request import Sequence
from services.scheduler.step_time import IDLE_FACTOR, MIN_CHUNK, StepTime
from shared.config import EngineConfig
from shared.messages import Request, pack_ids
from shared.sampling import SamplingParams

machines = st.tuples(st.floats(1e-4, 0.02), st.floats(1e-6, 5e-3), st.floats(0, 1e-7))


def cost(machine: tuple[float, float, float], rows: int, keys: int) -> float:
    base, per_row, per_key = machine
    return base + per_row * rows + per_key * keys


def keys_of(count: int, context: int) -> int:
    return count * context + count * (count + 1) // 2


def trained(machine: tuple[float, float, float], seed: int, noise: float) -> StepTime:
    draw = random.Random(seed)
    model = StepTime()
    for _ in range(200):
        rows, context = draw.choice([1, 4, 16, 32, 128, 512]), draw.randrange(16, 4096)
        model.observe(rows, rows * context, cost(machine, rows, rows * context) * draw.uniform(1 - noise, 1 + noise))
    return model


@settings(max_examples=60, deadline=None)
@given(machines, st.integers(0, 99))
def test_it_learns_a_machine(machine: tuple[float, float, float], seed: int) -> None:
    model = trained(machine, seed, noise=0.0)
    for rows, keys in ((1, 100), (32, 32 * 900), (400, 400 * 2000)):
        expected = cost(machine, rows, keys)
        assert abs(model.predict(rows, keys) - expected) <= 0.05 * expected + 1e-6


@settings(max_examples=100, deadline=None)
@given(machines, st.integers(0, 99), st.integers(0, 64), st.integers(0, 3000), st.floats(0.005, 1.0))
def test_a_chunk_keeps_the_step_within_its_time(
    machine: tuple[float, float, float], seed: int, rows: int, context: int, limit: float
) -> None:
    model = trained(machine, seed, noise=0.1)
    count = model.chunk(rows, rows * 500, context, limit, most=2048)
    assert MIN_CHUNK <= count <= 2048
    took = cost(machine, rows + count, rows * 500 + keys_of(count, context))
    allowed = limit if rows else limit * IDLE_FACTOR
    assert count == MIN_CHUNK or took <= 1.35 * allowed
    more = cost(machine, rows + 2 * count + 8, rows * 500 + keys_of(2 * count + 8, context))
    assert count == 2048 or more >= 0.65 * allowed


def test_the_first_chunks_grow_carefully() -> None:
    model = StepTime()
    sizes = []
    for _ in range(4):
        count = model.chunk(0, 0, sum(sizes), 0.1, most=2048)
        model.observe(count, keys_of(count, sum(sizes)), 1e-5 * count)
        sizes.append(count)
    assert sizes == [128, 512, 2048, 2048]


def test_it_follows_a_machine_that_slows_down() -> None:
    model = StepTime()
    for seconds in [0.01] * 100 + [0.05] * 200:
        model.observe(8, 800, seconds)
    assert 0.045 < model.predict(8, 800) < 0.055


def test_long_decoding_does_not_make_it_forget_what_a_prefill_costs() -> None:
    machine = (0.01, 1e-3, 1e-8)
    model = StepTime()
    for rows in (1, 2, 64, 200, 400):
        model.observe(rows, keys_of(rows, 0), cost(machine, rows, keys_of(rows, 0)))
    for i in range(5000):
        model.observe(8, 8 * (100 + i), cost(machine, 8, 8 * (100 + i)))
    count = model.chunk(8, 8 * 5000, 0, 0.1, most=2048)
    assert 0.08 < cost(machine, 8 + count, 8 * 5000 + keys_of(count, 0)) < 0.12


def test_a_long_prompt_does_not_stall_the_streams_beside_it() -> None:
    machine, limit = (0.01, 1e-3, 1e-8), 0.1
    config = EngineConfig(max_step_ms=1000 * limit, max_num_batched_tokens=2048)
    scheduler = Scheduler(config, num_blocks=2000, max_model_len=8192, eos_token_ids=[])
    for id in range(8):
        scheduler.add(sequence(id, prompt=200, output=2000))
    slowest = steps_of_prompt = 0.0
    for number in range(400):
        if number == 100:
            scheduler.add(sequence(99, prompt=3000, output=1))
        plan = scheduler.schedule(float(number))
        assert plan is not None
        keys = sum(s * c + c * (c + 1) // 2 for s, c in zip(plan.starts, plan.counts, strict=True))
        seconds = cost(machine, sum(plan.counts), keys)
        if number >= 100 and len(plan.slots) > 8:
            slowest = max(slowest, seconds)
            steps_of_prompt += 1
        scheduler.update(plan.step, [7] * sum(plan.samples), seconds)
    assert slowest < 1.2 * limit
    assert 3000 / 85 <= steps_of_prompt <= 3000 / 60
    assert scheduler.num_running == 8


def sequence(id: int, prompt: int, output: int) -> Sequence:
    ids = pack_ids(range(1000 * id, 1000 * id + prompt))
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=output, ignore_eos=True)
    return Sequence(b"api", Request(id, 0, ids, params), 0.0, id)


def test_a_constant_load_gives_no_nonsense() -> None:
    model = StepTime()
    for _ in range(500):
        model.observe(4, 4000, 0.02)
    assert 0.019 < model.predict(4, 4000) < 0.021
    assert MIN_CHUNK <= model.chunk(4, 4000, 0, 0.1, most=512) <= 128
