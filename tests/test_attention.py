"""Paged attention of the native module: against float64, and the same bits however it is cut and shared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker import native
from services.worker.executor import Ints

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
if native.unavailable() is None:
    from services.worker import _cpu

ISAS = _cpu.runnable_isas() if native.unavailable() is None else ["none"]
DTYPES = ["float32", "bfloat16", "float16"]
EPSILON = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}
PARTITION = 128  # keys, kPartition
each_isa = pytest.mark.parametrize("isa", ISAS)
some = settings(max_examples=25, deadline=None)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


@dataclass
class Layer:
    """Shape of an attention layer under test."""

    kv_heads: int
    group: int
    dim: int
    rope: int
    block_size: int
    window: int
    dtype: str
    softcap: float = 0.0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim

    def inv_freq(self) -> list[float]:
        return [float(np.float32(100.0 ** (-2 * i / max(self.rope, 1)))) for i in range(self.rope // 2)]


layers = st.builds(
    Layer,
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 7]),
    dim=st.sampled_from([4, 16, 24, 64, 80]),
    rope=st.sampled_from([0, 2, 4]),
    block_size=st.sampled_from([1, 5, 16, 48, 256]),
    window=st.sampled_from([0, 0, 1, 20, 128, 300]),
    dtype=st.sampled_from(DTYPES),
    softcap=st.sampled_from([0.0, 0.0, 1.5, 50.0]),
)


def attend_in_float64(qkv: np.ndarray, layer: Layer, scale: float) -> np.ndarray:
    """Causal attention of one sequence from position 0, keys and values rounded to the dtype."""
    length, heads = len(qkv), layer.heads
    x = torch.from_numpy(qkv).double().view(length, heads + 2 * layer.kv_heads, layer.dim)
    q, k, v = x.split([heads, layer.kv_heads, layer.kv_heads], dim=1)
    angles = torch.arange(length).float()[:, None, None] * torch.tensor(layer.inv_freq()).float()
    cos, sin, half = angles.cos().double(), angles.sin().double(), layer.rope // 2

    def rotate(t: torch.Tensor) -> torch.Tensor:
        a, b, rest = t.split([half, half, layer.dim - 2 * half], dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)

    q, k = rotate(q), rotate(k)
    k, v = (t.float().to(getattr(torch, layer.dtype)).double().repeat_interleave(layer.group, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if layer.softcap:
        scores = (scores / layer.softcap).tanh() * layer.softcap
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = (j <= i) & (j > i - (layer.window or length))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).reshape(length, -1).numpy()


def make(layer: Layer, isa: str, threads: int, blocks: int) -> Any:
    """A layer whose cache is full of NaN, as untouched memory may be."""
    made = _cpu.AttentionLayer(
        _cpu.Ops(isa, threads), layer.dtype, layer.heads, layer.kv_heads, layer.dim, layer.block_size, blocks,
        layer.window, layer.inv_freq(), 1.0, layer.softcap,
    )  # fmt: skip
    made.poison()
    return made


@dataclass
class Sequence:
    """Some tokens' queries, keys and values, their blocks, and how many of the tokens the step under test computes."""

    qkv: np.ndarray
    table: Ints
    last: int = 1

    def __len__(self) -> int:
        return len(self.qkv)


def run(attention: Any, layer: Layer, parts: list[tuple[Sequence, int, int]]) -> list[np.ndarray]:
    """One step over tokens [first, end) of each sequence; their outputs."""
    counts = [end - first for _, first, end in parts]
    tables = np.full((len(parts), max(len(s.table) for s, _, _ in parts)), 2**31 - 1, np.int32)
    for row, (s, _, _) in zip(tables, parts, strict=True):
        row[: len(s.table)] = s.table
    out = np.full((sum(counts), layer.heads * layer.dim), np.nan, np.float32)
    attention.run(
        np.concatenate([s.qkv[first:end] for s, first, end in parts]),
        np.concatenate([np.arange(first, end, dtype=np.int32) for _, first, end in parts]),
        np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        np.array([end for _, _, end in parts], np.int32),
        tables,
        layer.dim**-0.5,
        out,
    )
    return np.split(out, np.cumsum(counts)[:-1])


@each_isa
@some
@given(
    seed=st.integers(0, 2**32),
    layer=layers,
    length=st.sampled_from([1, 16, 127, 128, 129, 150, 600]),
    threads=st.sampled_from([1, 2]),
)
def test_attention_matches_float64_and_reads_nothing_unwritten(isa, seed, layer, length, threads):
    rng = np.random.default_rng(seed)
    blocks = -(-length // layer.block_size)
    attention = make(layer, isa, threads, blocks + 3)
    s = Sequence(random(rng, length, layer.width), rng.permutation(blocks + 3).astype(np.int32))
    cut = int(rng.integers(0, length))  # two chunks, the second one with its first tokens cached
    out = np.concatenate([run(attention, layer, [(s, a, b)])[0] for a, b in ((0, cut), (cut, length))])
    tolerance = 2e-5 if layer.dtype == "float32" else 4 * EPSILON[layer.dtype]  # a key may round the other way
    np.testing.assert_allclose(out, attend_in_float64(s.qkv, layer, layer.dim**-0.5), rtol=0, atol=tolerance)


def family(rng: np.random.Generator, layer: Layer, count: int, longest: int) -> list[Sequence]:
    """Sequences each of which begins like an earlier one, in the same blocks, for some whole blocks."""
    size, made = layer.block_size, list[Sequence]()
    free = list(rng.permutation(count * -(-longest // size)).astype(np.int32))
    for _ in range(count):
        length, last = int(rng.integers(1, longest + 1)), int(rng.choice([1, 1, 1, 2, 5, 40]))
        last = min(last, length)
        parent = made[int(rng.integers(len(made)))] if made else None
        common = min(length - last, len(parent) - parent.last) // size * size if parent else 0
        common = common if rng.random() < 0.7 else common // 2 // size * size
        qkv = random(rng, length, layer.width)
        table = np.array([free.pop() for _ in range(-(-length // size))], np.int32)
        if parent:
            qkv[:common] = parent.qkv[:common]
            table[: common // size] = parent.table[: common // size]
        made.append(Sequence(qkv, table, last))
    return made


def apart(sequences: list[Sequence], rng: np.random.Generator) -> list[Sequence]:
    """The same in blocks of their own."""
    free = rng.permutation(sum(len(s.table) for s in sequences)).astype(np.int32)
    tables = np.split(free, np.cumsum([len(s.table) for s in sequences])[:-1])
    return [Sequence(s.qkv, table, s.last) for s, table in zip(sequences, tables, strict=True)]


@each_isa
@some
@given(
    seed=st.integers(0, 2**32),
    layer=layers,
    count=st.sampled_from([2, 3, 9, 40]),
    threads=st.sampled_from([1, 2, 3]),
)
def test_a_shared_prefix_changes_no_bit(isa, seed, layer, count, threads):
    """Together over shared blocks, together over blocks of their own, each alone, and token by token."""
    rng = np.random.default_rng(seed)
    sequences = family(rng, layer, count, 700 if count < 10 else 300)
    shared = make(layer, isa, threads, 1 + max(int(s.table.max()) for s in sequences))
    own, copies = make(layer, isa, 1, sum(len(s.table) for s in sequences)), apart(sequences, rng)
    for attention, members in ((shared, sequences), (own, copies)):
        for s in members:
            if len(s) > s.last:
                run(attention, layer, [(s, 0, len(s) - s.last)])
    order = list(rng.permutation(count))
    together = run(shared, layer, [(s, len(s) - s.last, len(s)) for s in (sequences[i] for i in order)])
    beside = run(own, layer, [(s, len(s) - s.last, len(s)) for s in (copies[i] for i in order)])
    for i, a, b in zip(order, together, beside, strict=True):
        s, first = copies[i], len(copies[i]) - copies[i].last
        assert np.array_equal(a, b)
        assert np.array_equal(a, run(own, layer, [(s, first, len(s))])[0])
        for t in range(s.last):
            assert np.array_equal(a[t : t + 1], run(own, layer, [(s, first + t, first + t + 1)])[0])


def decoding(layer: Layer, lengths: list[int], common: int) -> Any:
    """A layer after a step of one token of each sequence, which have `common` tokens' blocks in common."""
    sequences = []
    first = 0
    for i, length in enumerate(lengths):
        blocks = np.arange(first, first + -(-length // layer.block_size), dtype=np.int32)
        first += len(blocks)
        if i:
            whole = min(common, length - 1) // layer.block_size
            blocks[:whole] = sequences[0].table[:whole]
        sequences.append(Sequence(np.ones((length, layer.width), np.float32), blocks))
    attention = make(layer, "", 1, first)
    run(attention, layer, [(s, len(s) - 1, len(s)) for s in sequences])
    return attention


def test_shared_partitions_are_read_once_a_step():
    layer = Layer(3, 3, 64, 0, 16, 0, "bfloat16")
    for common, expected in ((0, 16 * 9), (1024, 8 + 16), (992, 7 + 16 * 2)):
        attention = decoding(layer, [1100] * 16, common)
        assert attention.partitions == 3 * expected
    attention = decoding(layer, [1024, 1024, 300], 1008)  # all have two of its partitions, two have five more
    assert attention.partitions == 3 * (2 + 5 + 1 + 1 + 1)


def test_a_window_skips_what_it_does_not_see():
    attention = decoding(Layer(2, 2, 16, 0, 16, 300, "float32"), [4096], 0)
    assert attention.partitions == 2 * 3
    attention = decoding(Layer(2, 2, 16, 0, 16, 300, "float32"), [4096, 4096, 500], 4000)
    assert attention.partitions == 2 * (3 + 2 + 2)


@each_isa
def test_softcap_matches_tanh(isa):
    x = np.concatenate([np.linspace(-400, 400, 4001), np.geomspace(1e-6, 40, 999)]).astype(np.float32)
    y = x.copy()
    _cpu.Ops(isa, 2).softcap(y, 30.0)
    np.testing.assert_allclose(y, np.tanh(x.astype(np.float64) / 30) * 30, rtol=4e-7)
    odd = np.array([np.nan, np.inf, -np.inf, 0.0], np.float32)
    _cpu.Ops(isa, 1).softcap(odd, 30.0)
    assert np.isnan(odd[0])
    assert list(odd[1:]) == [30.0, -30.0, 0.0]
