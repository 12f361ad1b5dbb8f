"""Sampling inside the native step: the token of a row is the one its logits give, whatever else the step holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from services.worker import native
from services.worker.executor import StepBatch
from services.worker.reference import ReferenceExecutor
from services.worker.sampler import INVALID, Row
from shared.sampling import SamplingParams
from tests.dense import make_spec, make_weights
from tests.test_sampler import ISAS, native_sample

pytestmark = pytest.mark.skipif(not ISAS, reason=str(native.unavailable()))
each_isa = pytest.mark.parametrize("isa", ISAS)

VOCAB = 1301
SPEC = make_spec(vocab_size=VOCAB, hidden_size=40, tie_embeddings=True, final_logit_softcap=4.0)
ROWS = 200  # more than a block of the head takes
WAYS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 3.0, "top_k": 40},
    {"min_p": 0.05},
    {"top_k": 300, "top_p": 0.5, "min_p": 0.001},
]


def made(isa: str, dtype: Any = "float32", threads: int = 1, spoilt: bool = False) -> native.NativeExecutor:
    executor = native.NativeExecutor(SPEC, dtype, 16, threads, isa)
    weights = make_weights(SPEC)
    if spoilt:
        weights["embed.weight"][77] = np.nan
    executor.load(iter(weights.items()))
    executor.allocate_kv(ROWS + 1)
    return executor


def batch(rows: Sequence[int]) -> StepBatch:
    """A step with one token of each of these sequences, whose only token it is."""
    count = len(rows)
    return StepBatch(
        tokens=np.array(rows, np.int32) * 6,
        positions=np.zeros(count, np.int32),
        query_start=np.arange(count + 1, dtype=np.int32),
        context_lens=np.ones(count, np.int32),
        block_tables=np.array(rows, np.int32)[:, None],
        logit_rows=np.arange(count, dtype=np.int32),
    )


def ways(count: int) -> list[Row | None]:
    rng = np.random.default_rng(0)
    rows: list[Row | None] = []
    for r in range(count):
        bans = rng.integers(VOCAB, size=5).tolist() if r % 3 == 0 else None
        params = SamplingParams(**WAYS[r % len(WAYS)])  # type: ignore[arg-type]
        rows.append(None if r % 7 == 0 else Row(params, r, r // 2, bans))
    return rows


@each_isa
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("num_ids", [VOCAB, 1000, 1])
def test_tokens_are_those_of_the_logits(isa: str, dtype: str, num_ids: int) -> None:
    executor, step, rows = made(isa, dtype), batch(range(ROWS)), ways(ROWS)
    logits = executor.forward(step)[:, :num_ids].copy()
    tokens, kept = executor.forward_and_sample(step, rows, num_ids)
    assert tokens == native_sample(isa, logits, rows)
    assert kept.shape == (0, num_ids)
    assert len(set(tokens)) > 1 or num_ids == 1


@each_isa
def test_a_row_has_the_same_token_alone_and_in_any_batch(isa: str) -> None:
    rows = ways(ROWS)
    together, _ = made(isa).forward_and_sample(batch(range(ROWS)), rows, VOCAB)
    executor = made(isa, threads=2)
    for some in ([0], [9], [1, 2], list(range(40)), list(range(199, 0, -3))):
        tokens, _ = executor.forward_and_sample(batch(some), [rows[r] for r in some], VOCAB)
        assert tokens == [together[r] for r in some]


@each_isa
def test_kept_logits_are_the_models_own(isa: str) -> None:
    executor, step, rows = made(isa, threads=2), batch(range(ROWS)), ways(ROWS)
    logits = executor.forward(step)[:, :1000].copy()
    plain, _ = executor.forward_and_sample(step, rows, 1000)
    keeping = [3, 9, 100, 199]
    for r in keeping:
        rows[r] = Row(SamplingParams(), 5, r, [1, 2, 3], keep_logits=True)
    tokens, kept = executor.forward_and_sample(step, rows, 1000)
    assert np.array_equal(kept, logits[keeping])
    assert [t for r, t in enumerate(tokens) if r not in keeping] == [t for r, t in enumerate(plain) if r not in keeping]


@each_isa
def test_a_row_that_is_no_number_fails_alone(isa: str) -> None:
    """A tied head with a bad row spoils its id's logit in every row, but not where that id is padding."""
    executor, step = made(isa, spoilt=True), batch(range(12))
    rows = ways(12)
    assert executor.forward_and_sample(step, rows, VOCAB)[0] == [INVALID] * 12
    fine, _ = made(isa).forward_and_sample(step, rows, 77)
    assert executor.forward_and_sample(step, rows, 77)[0] == fine
    step.tokens[4] = 77
    assert executor.forward_and_sample(step, rows, 77)[0] == [*fine[:4], INVALID, *fine[5:]]


def test_the_reference_samples_in_numpy() -> None:
    reference = ReferenceExecutor(SPEC, "float32", 16)
    reference.load(make_weights(SPEC).items())
    reference.allocate_kv(ROWS + 1)
    rows: list[Row | None] = [None, Row(SamplingParams(), 1, 1, [5], keep_logits=True), None]
    step = batch([4, 5, 6])
    tokens, kept = reference.forward_and_sample(step, rows, 1000)
    logits = reference.forward(step)[:, :1000]
    assert np.array_equal(kept, logits[[1]])
    assert [tokens[0], tokens[2]] == logits[[0, 2]].argmax(1).tolist()
    assert tokens == made("").forward_and_sample(step, rows, 1000)[0]


def test_a_step_may_sample_nothing() -> None:
    step = batch([1, 2])
    step.logit_rows = step.logit_rows[:0]
    tokens, kept = made("").forward_and_sample(step, [], VOCAB)
    assert (tokens, kept.shape) == ([], (0, VOCAB))


def test_what_is_no_step_is_refused() -> None:
    executor = made("")
    for num_ids in (0, VOCAB + 1):
        with pytest.raises(ValueError, match="ids to sample from must be in"):
            executor.forward_and_sample(batch([1]), [None], num_ids)
    with pytest.raises(ValueError, match="does not exist"):
        executor.forward_and_sample(batch([1]), [None, Row(SamplingParams(), 0, 0)], 9)
    bad = batch([1])
    bad.tokens[0] = VOCAB
    with pytest.raises(ValueError, match="not in the vocabulary"):
        executor.forward_and_sample(bad, [None], VOCAB)
    with pytest.raises(ValueError, match="weights are not loaded"):
        native.NativeExecutor(SPEC, "float32", 16, 1).forward_and_sample(batch([1]), [None], VOCAB)
