"""The runner on a small random model: plans in, results out."""

from __future__ import annotations

import pytest
import torch

from services.worker.batch import PlanError
from services.worker.reference import ReferenceExecutor
from services.worker.runner import Runner
from services.worker.spec import DecoderSpec
from shared.config import EngineConfig
from shared.messages import Admit, Plan, pack_ids
from shared.model_info import ModelInfo
from shared.sampling import SamplingParams
from tests.dense import dense_logits, make_spec, make_weights

BLOCK = 4
NUM_BLOCKS = 64
EOS = 5
GREEDY = SamplingParams(temperature=0.0)
PROMPT = [11, 22, 33, 44, 55, 66]


def make_runner(spec: DecoderSpec | None = None) -> Runner:
    spec = spec or make_spec()
    executor = ReferenceExecutor(spec, "float32", BLOCK)
    executor.load(make_weights(spec).items())
    executor.allocate_kv(NUM_BLOCKS)
    info = ModelInfo(
        path="", architecture="Test", vocab_size=97, max_model_len=128, eos_token_ids=[EOS], dtype="float32"
    )
    return Runner(executor, info, EngineConfig(block_size=BLOCK))


def plan(
    *rows: tuple[int, int, int, int, list[int]],
    admit: list[Admit] | None = None,
    release: list[int] | None = None,
    copies: list[int] | None = None,
) -> Plan:
    """Rows are (slot, start, count, sample, new blocks)."""
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], [], []]
    return Plan(3, 8, release or [], copies or [], admit or [], *columns)  # type: ignore[arg-type]


def admit(slot: int, tokens: list[int] = PROMPT, params: SamplingParams = GREEDY) -> Admit:
    return Admit(slot, pack_ids(tokens), len(tokens), params)


def best(spec: DecoderSpec, ids: list[int]) -> int:
    return int(dense_logits(spec, make_weights(spec), ids)[-1].argmax())


def continue_slot(runner: Runner, slot: int, length: int, first_block: int, steps: int) -> list[int]:
    """Decodes `steps` tokens of a slot that knows `length` tokens, new blocks from `first_block` on."""
    tokens = []
    for position in range(length, length + steps):
        blocks = [first_block + position // BLOCK] if position % BLOCK == 0 else []
        tokens += runner.run(plan((slot, position, 1, 1, blocks))).tokens
    return tokens


def test_greedy_decoding_fills_in_its_own_tokens() -> None:
    runner, ids = make_runner(), list(PROMPT)
    result = runner.run(plan((2, 0, 6, 1, [7, 3]), admit=[admit(2)]))
    assert (result.epoch, result.step, len(result.tokens)) == (3, 8, 1)
    tokens = result.tokens + continue_slot(runner, 2, 6, 20, 5)
    for token in tokens:
        assert token == best(runner.executor.spec, ids)
        ids.append(token)


def test_results_come_in_the_order_of_the_rows_that_sample() -> None:
    runner = make_runner()
    spec, other = runner.executor.spec, [9, 8, 7]
    result = runner.run(
        plan((5, 0, 3, 1, [0]), (1, 0, 4, 0, [1]), (0, 0, 6, 1, [2, 3]), admit=[admit(0), admit(1), admit(5, other)])
    )
    assert result.tokens == [best(spec, other), best(spec, PROMPT)]
    assert runner.run(plan((1, 4, 2, 1, [4]))).tokens == [best(spec, PROMPT)]


def test_plans_without_rows() -> None:
    runner = make_runner()
    assert runner.run(plan()).tokens == []
    assert runner.run(plan(admit=[admit(0)])).tokens == []
    assert runner.run(plan((0, 0, 6, 0, [0, 1]))).tokens == []
    assert runner.run(plan(release=[0])).tokens == []


def test_a_fork_copies_the_last_block_and_shares_the_others() -> None:
    """Slot 1 has the prompt of slot 0: it reads block 0, and writes into its copy of block 1."""
    runner = make_runner()
    runner.run(plan((0, 0, 6, 1, [0, 1]), admit=[admit(0)]))
    sampled = SamplingParams(temperature=1.0, seed=3)
    forked = runner.run(plan((1, 5, 1, 1, [0, 2]), admit=[admit(1, params=sampled)], copies=[1, 2])).tokens
    forked += continue_slot(runner, 1, 6, 30, 4)
    alone = make_runner()
    expected = alone.run(plan((0, 0, 6, 1, [0, 1]), admit=[admit(0, params=sampled)])).tokens
    assert forked == expected + continue_slot(alone, 0, 6, 30, 4)
    assert continue_slot(runner, 0, 6, 40, 3) == continue_slot(make_after_prefill(), 0, 6, 40, 3)


def make_after_prefill() -> Runner:
    runner = make_runner()
    runner.run(plan((0, 0, 6, 1, [0, 1]), admit=[admit(0)]))
    return runner


def test_output_that_comes_back_with_an_admission_goes_on_as_before() -> None:
    """After a preemption or a resubmission the same seed continues the same stream."""
    params = SamplingParams(temperature=1.5, seed=99)
    runner = make_runner()
    tokens = runner.run(plan((0, 0, 6, 1, [0, 1]), admit=[admit(0, params=params)])).tokens
    tokens += continue_slot(runner, 0, 6, 10, 6)
    again = Admit(3, pack_ids(PROMPT + tokens[:3]), len(PROMPT), params)
    resumed = runner.run(plan((3, 0, 9, 1, [20, 21, 22]), admit=[again], release=[0])).tokens
    assert resumed + continue_slot(runner, 3, 9, 30, 3) == tokens[3:]
    assert len(set(tokens)) > 3


def test_nan_fails_its_own_row_and_the_plan_in_flight_still_runs() -> None:
    runner = make_runner()
    assert isinstance(runner.executor, ReferenceExecutor)
    runner.executor._weights["embed.weight"][77] = torch.nan
    result = runner.run(
        plan((0, 0, 6, 1, [0, 1]), (1, 0, 3, 1, [2]), admit=[admit(0), admit(1, [1, 77, 2], SamplingParams(seed=1))])
    )
    assert result.tokens[1] == -1
    second = runner.run(plan((1, 3, 1, 1, []), (0, 6, 1, 1, [])))
    assert second.tokens[0] == -1
    healthy = make_after_prefill()
    assert [result.tokens[0], second.tokens[1]] == [
        best(healthy.executor.spec, PROMPT),
        *continue_slot(healthy, 0, 6, 40, 1),
    ]


def test_min_tokens_holds_stop_tokens_and_eos_back() -> None:
    runner = make_runner()
    assert isinstance(runner.executor, ReferenceExecutor)
    runner.executor._weights["lm_head.weight"].zero_()  # all logits are equal: the lowest id that is not banned wins
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[0, 1, 2, 3, 4])
    tokens = runner.run(plan((0, 0, 6, 1, [0, 1]), admit=[admit(0, params=params)])).tokens
    assert tokens + continue_slot(runner, 0, 6, 10, 2) == [EOS + 1, EOS + 1, 0]


def test_reset_frees_the_slots() -> None:
    runner = make_after_prefill()
    runner.reset()
    with pytest.raises(PlanError):
        runner.run(plan((0, 6, 1, 1, [])))
    assert runner.run(plan((0, 0, 6, 1, [5, 6]), admit=[admit(0)])).tokens == [best(make_spec(), PROMPT)]


def test_a_warm_up_needs_one_block_and_leaves_nothing_behind() -> None:
    runner = make_runner()
    runner.executor.allocate_kv(1)
    runner.warm_up()
    tokens = PROMPT[:3]
    assert runner.run(plan((0, 0, 3, 1, [0]), admit=[admit(0, tokens)])).tokens == [best(make_spec(), tokens)]
