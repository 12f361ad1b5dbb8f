"""The reference executor against the decoder written out in float64."""

from __future__ import annotations

import random

import numpy as np
import pytest

from services.worker import reference
from services.worker.executor import Logits, StepBatch
from services.worker.reference import ReferenceExecutor, as_tensor
from services.worker.spec import DecoderSpec
from shared.errors import StartupError
from tests.dense import dense_logits, make_spec, make_weights

BLOCK = 4
NUM_BLOCKS = 200

SPECS: dict[str, dict[str, object]] = {
    "plain": {},
    "one-kv-head": {"num_kv_heads": 1},
    "no-groups": {"num_kv_heads": 4},
    "wide-heads": {"head_dim": 16, "attention_scale": 0.1},
    "qk-norm": {"qk_norm": True},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "tied": {"tie_embeddings": True},
    "windows": {"windows": (5, 0)},
    "window-of-one": {"windows": (1, 8)},
    "partial-rope": {"rope_dim": 4},
    "softcaps": {"attention_softcap": 1.5, "final_logit_softcap": 2.0},
    "attention-factor": {"attention_factor": 1.3},
    "all": {
        "qk_norm": True,
        "qkv_bias": True,
        "o_bias": True,
        "windows": (7, 3),
        "rope_dim": 6,
        "attention_factor": 0.7,
        "attention_softcap": 3.0,
    },
}


def make_executor(spec: DecoderSpec, dtype: str = "float32", seed: int = 0) -> ReferenceExecutor:
    """Loaded, and with a cache full of NaN, as untouched memory may be."""
    executor = ReferenceExecutor(spec, dtype, BLOCK)
    executor.load(make_weights(spec, seed).items())
    executor.allocate_kv(NUM_BLOCKS)
    for cache in (*executor._keys, *executor._values):
        cache.fill_(float("nan"))
    return executor


class Steps:
    """Feeds sequences to an executor in chunks, several at a time, and gathers the logits of all positions."""

    def __init__(self, executor: ReferenceExecutor, sequences: list[list[int]], seed: int = 0) -> None:
        self.executor = executor
        self.sequences = sequences
        blocks = random.Random(seed).sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self.tables = [[blocks.pop() for _ in range(-(-len(ids) // BLOCK))] for ids in sequences]
        self.computed = [0] * len(sequences)
        self.logits: list[list[Logits]] = [[] for _ in sequences]

    def step(self, counts: dict[int, int]) -> None:
        """Computes counts[i] more tokens of sequence i; the rows come in the order of the dict."""
        starts = {i: self.computed[i] for i in counts}
        ends = {i: starts[i] + count for i, count in counts.items()}
        width = max(len(table) for table in self.tables)
        tables = np.full((len(counts), width), 10**6, np.int32)  # entries past a sequence's blocks are arbitrary
        for row, i in enumerate(counts):
            used = -(-ends[i] // BLOCK)
            tables[row, :used] = self.tables[i][:used]
        total = sum(counts.values())
        logits = self.executor.forward(
            StepBatch(
                tokens=np.concatenate([self.sequences[i][starts[i] : ends[i]] for i in counts]).astype(np.int32),
                positions=np.concatenate([np.arange(starts[i], ends[i]) for i in counts]).astype(np.int32),
                query_start=np.cumsum([0, *counts.values()]).astype(np.int32),
                context_lens=np.array(list(ends.values()), np.int32),
                block_tables=tables,
                logit_rows=np.arange(total, dtype=np.int32)[::-1].copy(),
            )
        )[::-1]
        assert logits.dtype == np.float32
        for i, part in zip(counts, np.split(logits, np.cumsum([*counts.values()])[:-1]), strict=True):
            self.logits[i].append(part)
            self.computed[i] = ends[i]

    def run(self, seed: int) -> list[Logits]:
        """Random mixes of chunks and single tokens until all is computed."""
        draw = random.Random(seed)
        while left := [i for i, ids in enumerate(self.sequences) if self.computed[i] < len(ids)]:
            chosen = draw.sample(left, draw.randint(1, len(left)))
            sizes = {i: draw.choice([1, 1, 2, 5, 1000]) for i in chosen}
            self.step({i: min(n, len(self.sequences[i]) - self.computed[i]) for i, n in sizes.items()})
        return [np.concatenate(parts) for parts in self.logits]


def sequences_of(*lengths: int) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(97) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("name", SPECS)
def test_any_spec_in_mixed_batches(name: str) -> None:
    spec = make_spec(**SPECS[name])
    weights, sequences = make_weights(spec), sequences_of(1, 3, 4, 5, 17, 40)
    found = Steps(make_executor(spec), sequences).run(seed=2)
    for ids, logits in zip(sequences, found, strict=True):
        np.testing.assert_allclose(logits, dense_logits(spec, weights, ids), atol=2e-5)


@pytest.mark.parametrize("windows", [(0, 0), (0, 5)])
def test_tiles_of_a_long_chunk(windows: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "QUERY_TILE", 6)
    spec = make_spec(windows=windows)
    (ids,) = sequences_of(33)
    steps = Steps(make_executor(spec), [ids])
    for count in (2, 19, 12):
        steps.step({0: count})
    expected = dense_logits(spec, make_weights(spec), ids)
    np.testing.assert_allclose(np.concatenate(steps.logits[0]), expected, atol=2e-5)


def test_a_sequence_of_nan_leaves_its_neighbours_alone() -> None:
    spec = make_spec()
    executor = make_executor(spec)
    executor._weights["embed.weight"][7] = float("nan")
    good, bad = [1, 2, 3, 4, 5, 6], [1, 7, 3, 4, 5, 6]
    steps = Steps(executor, [good, bad])
    for count in (3, 1, 1, 1):
        steps.step({1: count, 0: count})
    assert np.isnan(np.concatenate(steps.logits[1])[1:]).all()
    np.testing.assert_allclose(np.concatenate(steps.logits[0]), dense_logits(spec, make_weights(spec), good), atol=2e-5)


def test_copied_blocks_serve_in_place_of_their_sources() -> None:
    spec = make_spec()
    (ids,) = sequences_of(12)
    steps = Steps(make_executor(spec), [ids])
    steps.tables[0] = [0, 1]
    steps.step({0: 7})
    steps.executor.copy_blocks([(0, 5), (5, 7), (1, 8)])
    for cache in (*steps.executor._keys, *steps.executor._values):
        cache[: 6 * BLOCK] = float("nan")
    steps.tables[0] = [7, 8, 2]
    steps.step({0: 5})
    expected = dense_logits(spec, make_weights(spec), ids)
    np.testing.assert_allclose(np.concatenate(steps.logits[0]), expected, atol=2e-5)


def _rows(tokens: list[int], start: int, table: list[int]) -> StepBatch:
    n = len(tokens)
    return StepBatch(
        tokens=np.array(tokens, np.int32),
        positions=np.arange(start, start + n, dtype=np.int32),
        query_start=np.array([0, n], np.int32),
        context_lens=np.array([start + n], np.int32),
        block_tables=np.array([table], np.int32),
        logit_rows=np.array([], np.int32),
    )


def test_a_step_without_logits_returns_none_of_them() -> None:
    logits = make_executor(make_spec()).forward(_rows([1, 2, 3], 0, [5]))
    assert logits.shape == (0, 97)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.05), ("float16", 0.005)])
def test_half_precision_is_near(dtype: str, tolerance: float) -> None:
    spec = make_spec(qk_norm=True, qkv_bias=True)
    sequences = sequences_of(20, 31)
    executor = make_executor(spec, dtype)
    weights = {
        name: as_tensor(weight).to(executor.dtype).float().numpy() for name, weight in make_weights(spec).items()
    }
    for ids, logits in zip(sequences, Steps(executor, sequences).run(seed=0), strict=True):
        np.testing.assert_allclose(logits, dense_logits(spec, weights, ids), atol=tolerance)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_block_bytes(dtype: str, size: int) -> None:
    executor = ReferenceExecutor(make_spec(num_layers=3, num_kv_heads=2, head_dim=8), dtype, 16)
    assert executor.block_bytes() == 16 * 2 * 3 * 2 * 8 * size


def test_a_missing_or_misshapen_weight_is_named() -> None:
    weights = make_weights(make_spec())
    missing = {name: weight for name, weight in weights.items() if name != "layers.1.up.weight"}
    with pytest.raises(StartupError, match=r"layers\.1\.up\.weight should have shape \(40, 24\), got None"):
        ReferenceExecutor(make_spec(), "float32", BLOCK).load(missing.items())
    weights["layers.0.o.weight"] = np.zeros((24, 31), np.float32)
    with pytest.raises(StartupError, match=r"layers\.0\.o\.weight should have shape \(24, 32\), got \(24, 31\)"):
        ReferenceExecutor(make_spec(), "float32", BLOCK).load(weights.items())


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(StartupError, match="'swiglu' is not supported"):
        ReferenceExecutor(make_spec(activation="swiglu"), "float32", BLOCK)
