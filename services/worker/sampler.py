"""Choosing the next token. Without state: a row's token depends on its logits, its seed and its output index alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shared.sampling import SamplingParams

GREEDY_TEMPERATURE = 1e-4  # at or below: greedy
INVALID = -1  # in place of a token: the row's logits hold NaN, or leave nothing to choose from
MASK64 = (1 << 64) - 1
Floats = NDArray[np.float32]


class Row(NamedTuple):
    """How to sample one row of logits."""

    params: SamplingParams
    seed: int
    index: int  # output tokens before this one
    banned: list[int] | None = None  # ids that must not be chosen


def is_greedy(params: SamplingParams) -> bool:
    """Whether the best token is taken, whatever the seed."""
    return params.temperature <= GREEDY_TEMPERATURE or params.top_k == 1


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """One token id per row, or INVALID. logits: float32 [R, vocab], left as it is."""
    scores = logits.detach().cpu().numpy()
    best = scores.argmax(axis=1)  # the lowest id of equals; a NaN if there is one
    valid = np.isfinite(scores[np.arange(len(rows)), best])
    tokens: list[int] = np.where(valid, best, INVALID).tolist()
    for r, row in enumerate(rows):
        if valid[r] and (row.banned or not is_greedy(row.params)):
            tokens[r] = sample_row(scores[r], row)
    return tokens


def sample_row(scores: Floats, row: Row) -> int:
    """The token of one row. scores: float32 [vocab], free of NaN."""
    if row.banned:
        scores = scores.copy()
        scores[row.banned] = -np.inf
    best = int(scores.argmax())
    if not np.isfinite(scores[best]):
        return INVALID
    if is_greedy(row.params):
        return best
    weights, ids = candidates(scores, float(scores[best]), row.params)
    choice = pick(weights, uniform(row.seed, row.index))
    return choice if ids is None else int(ids[choice])


def candidates(scores: Floats, best: float, params: SamplingParams) -> tuple[Floats, NDArray[np.int64] | None]:
    """Weights (the best has 1) of the tokens that the filters leave, in id order, and their ids (None: all tokens).

    The filters apply in the order temperature, top_k, top_p, min_p. Tokens as likely as the k-th stay, as in
    transformers; of tokens as likely as the last of the nucleus the lowest ids stay.
    """
    ids: NDArray[np.int64] | None = None
    if 0 < params.top_k < len(scores):
        ids = np.flatnonzero(scores >= np.partition(scores, -params.top_k)[-params.top_k])
        scores = scores[ids]
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((scores - np.float32(best)) / np.float32(params.temperature))
    if params.top_p < 1.0:
        kept = nucleus(weights, params.top_p)
        weights, ids = weights[kept], kept if ids is None else ids[kept]
    if params.min_p > 0.0:
        kept = np.flatnonzero(weights >= np.float32(params.min_p))
        weights, ids = weights[kept], kept if ids is None else ids[kept]
    return weights, ids


def nucleus(weights: Floats, top_p: float) -> NDArray[np.int64]:
    """Indexes, ascending, of the fewest weights, heaviest first, that hold `top_p` of the mass (arXiv 1904.09751).

    Nothing lighter than a V-th of the mass outside can be in it, which spares most of the sort.
    """
    total = float(weights.sum(dtype=np.float64))
    heavy = np.flatnonzero(weights >= (1.0 - top_p) * total / len(weights))
    ranked = np.sort(weights[heavy])[::-1]
    size = int(np.searchsorted(np.cumsum(ranked, dtype=np.float64), top_p * total)) + 1
    last = ranked[min(size, len(ranked)) - 1]
    above = heavy[weights[heavy] > last]
    equal = heavy[weights[heavy] == last][: size - len(above)]
    return np.sort(np.concatenate((above, equal)))


def pick(weights: Floats, u: float) -> int:
    """The index at share `u` of the cumulative weights."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    total = cumulative[-1]
    choice = np.searchsorted(cumulative, u * total, side="right")
    return int(min(choice, np.searchsorted(cumulative, total)))  # u * total can round up to total


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) of this seed and output index: SplitMix64 (Steele, Lea, Flood 2014), keyed by the seed."""
    return (_mix(_mix(seed) + 0x9E3779B97F4A7C15 * (index + 1)) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)
