"""The samplers, numpy's and the native one, against a plain float64 sampler, statistics, and each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from services.worker import native, sampler
from services.worker.sampler import INVALID, Floats, Row, first_above, locate, nucleus, uniform
from shared.sampling import SamplingParams

if native.unavailable() is None:
    from services.worker import _cpu

    ISAS: list[str] = _cpu.runnable_isas()
else:
    ISAS = []

MARGIN = 1e-6  # no share of a drawn case lies this close to a limit, so float32 and float64 must agree


def native_sample(
    isa: str, logits: Floats, rows: Sequence[Row | None], *, piece: int = 96, threads: int = 1, kept: int = 0
) -> Any:
    """As a step samples, from scores that come `piece` ids at a time; with `kept`, the rows that are kept too."""
    tokens, keep = [], np.empty((kept, logits.shape[1]), np.float32)
    ops = _cpu.Ops(isa, threads)
    for first in range(0, len(rows), 96):
        some = slice(first, first + 96)
        tokens += ops.sample(np.ascontiguousarray(logits[some]), native.draws(rows[some]), keep, piece)
    return (tokens, keep) if kept else tokens


SAMPLERS = {"numpy": sampler.sample} | {isa: partial(native_sample, isa) for isa in ISAS}
each_sampler = pytest.mark.parametrize("sample", SAMPLERS.values(), ids=SAMPLERS)
each_isa = pytest.mark.parametrize("isa", ISAS)


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **fields})  # type: ignore[arg-type]


def logits_of(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, vocab), np.float32) * np.float32(scale)


def naive_probabilities(logits: list[float], p: SamplingParams) -> tuple[NDArray[np.float64], float]:
    """The filtered distribution, by full stable sorts in float64, and how close a share comes to a filter's limit."""
    margin = 1.0
    x = np.array(logits, np.float64) / p.temperature
    if 0 < p.top_k < len(x):
        x = np.where(x >= np.sort(x)[-p.top_k], x, -np.inf)
    probabilities = np.exp(x - x.max())
    probabilities /= probabilities.sum()
    if p.top_p < 1:
        order = np.argsort(-probabilities, kind="stable")
        mass = np.cumsum(probabilities[order])
        margin = float(np.abs(mass - p.top_p).min())
        probabilities[order[int((mass < p.top_p).sum()) + 1 :]] = 0
    if p.min_p > 0:
        ratio = probabilities / probabilities.max()
        margin = float(np.abs(ratio - p.min_p)[ratio < 1].min(initial=margin))
        probabilities[ratio < p.min_p] = 0
    return probabilities / probabilities.sum(), margin


@each_sampler
@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(st.integers(-40, 40).map(lambda i: i / 8), min_size=1, max_size=600),
    temperature=st.floats(0.05, 3),
    top_k=st.integers(-1, 20),
    top_p=st.one_of(st.just(1.0), st.floats(1e-3, 0.9999)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    seed=st.integers(-(1 << 63), (1 << 64) - 1),
    index=st.integers(0, 10_000),
)
def test_equals_the_naive_sampler(
    sample: Any, logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int, index: int
) -> None:
    p = params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    token = sample(np.array([logits], np.float32), [Row(p, seed, index)])[0]
    if top_k == 1:
        assert token == int(np.argmax(logits))
        return
    probabilities, margin = naive_probabilities(logits, p)
    cumulative, u = np.cumsum(probabilities), uniform(seed, index)
    assume(min(margin, np.abs(cumulative[:-1] - u).min(initial=1)) > MARGIN)
    assert token == int(np.searchsorted(cumulative, u, side="right"))


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.floats(2**-100, 1, width=32), min_size=1, max_size=400),
    share=st.floats(1e-9, 0.999999),
)
def test_nucleus_is_the_smallest_set_that_holds_the_mass(weights: list[float], share: float) -> None:
    w = np.array(weights, np.float32)
    kept = nucleus(w, share)
    total, inside = w.sum(dtype=np.float64), w[kept].sum(dtype=np.float64)
    assert list(kept) == sorted(set(kept.tolist()))
    assert inside >= share * total * (1 - 1e-12)
    assert len(kept) == 1 or inside - w[kept].min() < share * total * (1 + 1e-12)
    assert w[kept].min() >= np.delete(w, kept).max(initial=0)


def test_nucleus_takes_equals_by_their_ids() -> None:
    assert nucleus(np.array([0.5, 1, 0.5, 0.5, 0.5, 1], np.float32), 0.6).tolist() == [0, 1, 5]
    assert nucleus(np.ones(8, np.float32), 0.45).tolist() == [0, 1, 2, 3]


@given(weights=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=2000), share=st.floats(0, 1 - 2**-53))
def test_locate_never_lands_on_a_token_without_weight(weights: list[float], share: float) -> None:
    w = np.array([*weights, 0.5, *[0.0] * 300], np.float32)
    assert w[locate(w, share)] > 0


def test_rounding_ends_at_the_last_token_with_weight() -> None:
    running = np.array([0.25, 1.0, 1.0, 1.0])
    assert [first_above(running, target) for target in (0.0, 0.25, 0.9, 1.0, 1.1)] == [0, 1, 1, 1, 1]


@each_sampler
@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-8, 1e-4])
def test_tiny_temperatures_are_greedy(sample: Any, temperature: float) -> None:
    logits = logits_of(4, 1000)
    assert sample(logits, [Row(params(temperature=temperature), 1, 0)] * 4) == logits.argmax(1).tolist()


@each_sampler
def test_extremes_of_the_filters(sample: Any) -> None:
    logits = logits_of(1, 1000, scale=1.0)
    best, plain = int(logits.argmax()), sample(logits, [Row(params(), 8, 3)])
    assert plain != [best]
    for off in ({"top_k": 1000}, {"top_k": 1001}, {"top_k": 2**31}, {"top_k": -1}, {"top_k": 0}, {"min_p": 0.0}):
        assert sample(logits, [Row(params(**off), 8, 3)]) == plain
    for narrow in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1.1e-4}):
        assert sample(logits, [Row(params(**narrow), 8, 3)]) == [best]
    assert 0 <= sample(logits, [Row(params(temperature=100.0), 7, 3)])[0] < 1000
    assert sample(np.array([[1e38, -1e38, -3e38]], np.float32), [Row(params(temperature=1.1e-4), 1, 0)]) == [0]


@each_sampler
def test_ties_go_to_the_lowest_id(sample: Any) -> None:
    logits = np.zeros((1, 300), np.float32)
    logits[0, [200, 17, 299]] = 5.0
    assert sample(logits, [None]) == [17]
    assert sample(logits, [Row(params(temperature=0), 0, 0, [17])]) == [200]
    assert {sample(logits, [Row(params(top_k=1), seed, 0)])[0] for seed in range(20)} == {17}
    assert {sample(logits, [Row(params(top_k=2), seed, 0)])[0] for seed in range(60)} == {17, 200, 299}


@each_sampler
def test_a_bad_row_fails_alone(sample: Any) -> None:
    logits = logits_of(6, 500)
    good = sample(logits, [Row(params(), 5, 0)] * 6)
    logits[1, 40] = math.nan
    logits[2, 41] = math.inf
    logits[3] = -math.inf
    rows: list[Row | None] = [Row(params(), 5, 0)] * 6
    assert sample(logits, rows) == [good[0], INVALID, INVALID, INVALID, *good[4:]]
    assert sample(logits, [None] * 6)[1:4] == [INVALID] * 3
    assert sample(logits, [Row(params(), 5, 0, [40])] * 6)[1] == INVALID
    assert sample(logits, [Row(params(), 5, 0, list(range(500)))] * 6)[0] == INVALID


@each_sampler
def test_banned_ids_are_never_chosen_and_the_logits_stay(sample: Any) -> None:
    logits = logits_of(1, 50)
    before = logits.copy()
    best = np.argsort(-logits[0]).tolist()
    assert sample(logits, [Row(params(temperature=0), 0, 0, best[:2])]) == [best[2]]
    drawn = {sample(logits, [Row(params(), seed, 0, best[:5])])[0] for seed in range(300)}
    assert len(drawn) > 5
    assert not drawn & set(best[:5])
    assert np.array_equal(logits, before)


@each_sampler
def test_a_row_is_the_same_alone_and_in_any_batch(sample: Any) -> None:
    logits = logits_of(24, 5003)
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 0},
        {"top_p": 0.8},
        {"top_k": 9},
        {"min_p": 0.1, "top_p": 0.95},
    ]
    rows: list[Row | None] = [Row(params(**kinds[r % len(kinds)]), r, 2 * r) for r in range(24)]
    together = sample(logits, rows)
    assert [sample(logits[r : r + 1], rows[r : r + 1])[0] for r in range(24)] == together
    order = np.random.default_rng(0).permutation(24)
    assert sample(logits[order], [rows[r] for r in order]) == [together[r] for r in order]


def chi_square_limit(cells: int) -> float:
    """The 1 - 1e-5 quantile for `cells` - 1 degrees of freedom (Wilson and Hilferty 1931)."""
    df = cells - 1
    return df * (1 - 2 / (9 * df) + 4.265 * math.sqrt(2 / (9 * df))) ** 3


def chi_square(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    expected = probabilities * counts.sum()
    assert counts[expected == 0].sum() == 0
    counts, expected = counts[expected > 0], expected[expected > 0]
    return float(((counts - expected) ** 2 / expected).sum())


@each_sampler
@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 2.0}, {"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.05, "temperature": 0.8}]
)
@pytest.mark.parametrize("vary", ["seed", "index"])
def test_draws_follow_the_distribution(sample: Any, fields: dict[str, float], vary: str) -> None:
    logits = logits_of(1, 40, seed=3, scale=1.0)
    p = params(**fields)
    probabilities, _ = naive_probabilities(logits[0].tolist(), p)
    draws = [Row(p, n, 5) if vary == "seed" else Row(p, 1234, n) for n in range(4000)]
    tokens = sample(np.repeat(logits, len(draws), axis=0), draws)
    counts = np.bincount(tokens, minlength=40)
    assert chi_square(counts, probabilities) < chi_square_limit(int((probabilities > 0).sum()))


@pytest.mark.parametrize("step", [(1, 0), (0, 1), (1, 1)])
def test_neighbouring_seeds_and_indexes_are_independent(step: tuple[int, int]) -> None:
    """Sample i of n draws with seed + i: pairs of neighbours must fill the unit square evenly."""
    pairs = [(uniform(s, i), uniform(s + step[0], i + step[1])) for s in range(100) for i in range(100)]
    cells = [int(a * 8) * 8 + int(b * 8) for a, b in pairs]
    assert chi_square(np.bincount(cells, minlength=64), np.full(64, 1 / 64)) < chi_square_limit(64)


def test_the_stream_of_a_seed_is_fixed() -> None:
    """Promise 2 outlives a release: these numbers must never change."""
    assert [uniform(0, 0), uniform(1, 0), uniform(1, 1), uniform(-1, 7)] == [
        0.7012121095215252,
        0.9435642308648544,
        0.04525699773739167,
        0.06511535853691575,
    ]
    assert uniform(-1, 7) == uniform((1 << 64) - 1, 7)


@each_isa
@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.integers(1, 40) | st.sampled_from([255, 256, 257, 700, 5003]),
    steps=st.sampled_from([1, 4, 1000]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 4.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 50, 300]),
    top_p=st.sampled_from([1.0, 0.99, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.02, 1.0]),
    spoil=st.sampled_from([None, None, None, math.nan, math.inf, -math.inf]),
    banned=st.integers(0, 4),
    piece=st.sampled_from([1, 32, 96, 4096]),
    threads=st.sampled_from([1, 2]),
)
def test_native_and_numpy_choose_alike(
    isa: str,
    seed: int,
    vocab: int,
    steps: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    spoil: float | None,
    banned: int,
    piece: int,
    threads: int,
) -> None:
    """Up to the last bits of exp: where a choice hangs on them, the neighbour among those kept may be taken."""
    rng = np.random.default_rng(seed)
    logits = np.round(rng.standard_normal((4, vocab), np.float32) * 3 * steps) / np.float32(steps)
    if spoil is not None:
        logits[1, rng.integers(vocab, size=1 + vocab // 2)] = spoil
    p = params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    bans = rng.integers(vocab, size=banned).tolist()
    rows = [Row(p, int(rng.integers(1 << 62)), r, bans if r % 2 else None) for r in range(4)]
    expected = sampler.sample(logits, rows)
    tokens = native_sample(isa, logits, rows, piece=piece, threads=threads)
    for r, row in enumerate(rows):
        if tokens[r] != expected[r]:
            assert INVALID not in (tokens[r], expected[r])
            assert not sampler.is_greedy(p)
            scores = logits[r].astype(np.float64)
            scores[row.banned or []] = -np.inf
            probabilities, margin = naive_probabilities(scores.tolist(), p)
            edges = np.cumsum(probabilities) - uniform(row.seed, row.index)
            assert min(margin, np.abs(edges).min()) < MARGIN


@each_isa
@settings(max_examples=60, deadline=None)
@given(
    live=st.lists(st.integers(0, 2999), min_size=1, max_size=900),
    top_k=st.integers(0, 1000),
    top_p=st.one_of(st.just(1.0), st.fractions(0, 1, max_denominator=64).map(float).filter(bool)),
    banned=st.lists(st.integers(0, 2999), max_size=3),
    seed=st.integers(-(1 << 63), (1 << 64) - 1),
)
def test_native_and_numpy_agree_exactly_where_weights_are_exact(
    isa: str, live: list[int], top_k: int, top_p: float, banned: list[int], seed: int
) -> None:
    """Each weight is 1 or 0, so exp has no say."""
    logits = np.full((1, 3000), -np.inf, np.float32)
    logits[0, live] = 1.5
    rows = [Row(params(top_k=top_k, top_p=top_p, temperature=0.7), seed, index, banned) for index in range(8)]
    many = np.repeat(logits, 8, axis=0)
    assert native_sample(isa, many, rows) == sampler.sample(many, rows)


@each_isa
def test_kept_logits_are_those_that_came(isa: str) -> None:
    logits = logits_of(5, 333)
    logits[3, 7] = math.nan
    rows = [
        None,
        Row(params(), 1, 0, [5, 6], keep_logits=True),
        Row(params(), 1, 0),
        Row(params(temperature=0), 1, 0, keep_logits=True),
        None,
    ]
    tokens, kept = native_sample(isa, logits, rows, kept=2)
    assert np.array_equal(kept, logits[[1, 3]], equal_nan=True)
    assert tokens == native_sample(isa, logits, [None, Row(params(), 1, 0, [5, 6]), rows[2], None, None])


@pytest.mark.skipif(len(ISAS) < 2, reason="one build of the kernels runs here")
def test_every_build_chooses_the_same() -> None:
    logits = logits_of(90, 5003)
    rows: list[Row | None] = [Row(params(top_p=0.9 if r % 2 else 1.0), r, 0) for r in range(90)]
    assert native_sample(ISAS[0], logits, rows) == native_sample(ISAS[1], logits, rows)


@pytest.mark.skipif(not ISAS, reason="no native backend here")
def test_rows_that_are_none_are_refused() -> None:
    ops, logits = _cpu.Ops("", 1), logits_of(2, 8)
    with pytest.raises(ValueError, match="a row to sample does not exist"):
        ops.sample(logits, native.draws([None, None, Row(params(), 1, 0)]), np.empty((0, 8), np.float32), 8)
    with pytest.raises(ValueError, match="kept must have a row for each"):
        ops.sample(logits, native.draws([Row(params(), 1, 0, keep_logits=True)]), np.empty((0, 8), np.float32), 8)
