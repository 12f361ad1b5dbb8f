"""Choosing the next token. Without state: a row's token depends on its logits, its seed and its output index alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.sampling import SamplingParams

GREEDY_TEMPERATURE = 1e-4  # at or below: greedy
INVALID = -1  # in place of a token: the row's logits hold NaN, or leave nothing to choose from
MASK64 = (1 << 64) - 1
BUCKET_SHIFT = 18  # of float32 bits: 32 buckets per power of two
SUM_BLOCK = 256
Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(slots=True)
class Row:
    """How to sample one row of logits."""

    params: SamplingParams
    seed: int
    index: int  # output tokens before this one
    banned: list[int] | None = None  # ids that must not be chosen
    keep_logits: bool = False  # whoever samples hands the row's logits back too, as they came


def is_greedy(params: SamplingParams) -> bool:
    """Whether the best token is taken, whatever the seed."""
    return params.temperature <= GREEDY_TEMPERATURE or params.top_k == 1


def sample(scores: Floats, rows: Sequence[Row | None]) -> list[int]:
    """One token id per row, or INVALID; a row of None is greedy. scores: the logits, [R, vocab], left as they are.

    The native executor samples by the same rules in csrc/cpu/sample.cpp; only the last bits of its exp differ.
    """
    best = scores.argmax(axis=1)  # the lowest id of equals; a NaN if there is one
    valid = np.isfinite(scores[np.arange(len(rows)), best])
    tokens: list[int] = np.where(valid, best, INVALID).tolist()
    for r, row in enumerate(rows):
        if row is not None and valid[r]:
            tokens[r] = sample_row(scores[r], row)
    return tokens


def sample_row(scores: Floats, row: Row) -> int:
    """The token of one row. scores: float32 [vocab], free of NaN."""
    if row.banned:
        scores = scores.copy()
        scores[[id for id in row.banned if id < len(scores)]] = -np.inf
    best = int(scores.argmax())
    if not np.isfinite(scores[best]):
        return INVALID
    if is_greedy(row.params):
        return best
    weights, ids = candidates(scores, scores[best], row.params)
    choice = locate(weights, uniform(row.seed, row.index))
    return choice if ids is None else int(ids[choice])


def candidates(scores: Floats, best: np.float32, params: SamplingParams) -> tuple[Floats, Ids | None]:
    """Weights (the best has 1) of the tokens that the filters leave, in id order, and their ids (None: all tokens).

    The filters apply in the order temperature, top_k, top_p, min_p. Tokens as likely as the k-th stay, as in
    transformers; of tokens as likely as the last of the nucleus the lowest ids stay.
    """
    ids: Ids | None = None
    if 0 < params.top_k < len(scores):
        ids = np.flatnonzero(scores >= np.partition(scores, -params.top_k)[-params.top_k])
        scores = scores[ids]
    with np.errstate(over="ignore", under="ignore"):
        weights = scores - best
        weights /= np.float32(params.temperature)
        np.exp(weights, out=weights)
    if params.top_p < 1.0:
        kept = nucleus(weights, params.top_p)
        weights, ids = weights[kept], kept if ids is None else ids[kept]
    if params.min_p > 0.0:
        kept = np.flatnonzero(weights >= np.float32(params.min_p))
        weights, ids = weights[kept], kept if ids is None else ids[kept]
    return weights, ids


def nucleus(weights: Floats, top_p: float) -> Ids:
    """Indexes, ascending, of the fewest weights, heaviest first, that hold `top_p` of the mass (arXiv 1904.09751).

    Positive floats order as their bits do: the upper bits name a bucket, and only the bucket in which the mass reaches
    `top_p` is sorted.
    """
    buckets = weights.view(np.int32) >> BUCKET_SHIFT
    masses = np.bincount(buckets, weights)
    outside = np.cumsum(masses)  # up to and including a bucket, from the lightest
    allowed = (1.0 - top_p) * outside[-1]
    edge = min(int(np.searchsorted(outside, allowed, side="right")), len(masses) - 1)
    ranked = np.sort(weights[buckets == edge])  # ascending: drop from its front what still fits outside
    room = allowed - (outside[edge] - masses[edge])
    dropped = int(np.searchsorted(np.cumsum(ranked, dtype=np.float64), room, side="right"))
    dropped = min(dropped, len(ranked) - 1)
    last = ranked[dropped]
    kept = np.flatnonzero(weights >= last)
    surplus = dropped - int(np.searchsorted(ranked, last))  # equals of the last that lie outside
    if surplus:
        equal = np.flatnonzero(weights[kept] == last)
        kept = np.delete(kept, equal[len(equal) - surplus :])
    return kept


def locate(weights: Floats, share: float) -> int:
    """The index at which the running sum of `weights` passes `share` of their total.

    Sums by blocks first, always in the same order, so that the sum over a vocabulary runs at vector speed.
    """
    sums = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), SUM_BLOCK), dtype=np.float64))
    target = share * float(sums[-1])
    block = first_above(sums, target)
    before = float(sums[block - 1]) if block else 0.0
    first = block * SUM_BLOCK
    running = np.cumsum(weights[first : first + SUM_BLOCK], dtype=np.float64)
    return first + first_above(running, target - before)


def first_above(running: NDArray[np.float64], target: float) -> int:
    """The first index above `target`; where rounding leaves none, the last that adds weight."""
    index = np.searchsorted(running, target, side="right")
    return int(min(index, np.searchsorted(running, running[-1])))


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) of this seed and output index: SplitMix64 (Steele, Lea, Flood 2014), keyed by the seed."""
    return (_mix(_mix(seed) + 0x9E3779B97F4A7C15 * (index + 1)) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)
