"""Quantised kernels against numpy, bit for bit; executors against the reference, and their promise of the same bits."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker import native
from services.worker.loader import weight_formats, weights
from services.worker.models import decoder_spec
from services.worker.quantize import Codes, formats, panel_bytes, quantise, quantise_rows
from services.worker.reference import ReferenceExecutor
from shared.errors import StartupError
from shared.gguf_file import GGML_TYPES
from shared.model_config import read_config
from shared.sampling import SamplingParams
from tests import test_native as plain
from tests.fidelity.driver import serve
from tests.model_factory import smollm2, tiny_model, to_gguf
from tests.weights import as_weight, as_weights

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
if native.unavailable() is None:
    from services.worker import _cpu

FORMATS = ["q8", "q4", "w8"]
QUANTIZATIONS = ["int8", "int4", "w8a8"]
each_isa = plain.each_isa
some = settings(max_examples=25, deadline=None)


def awkward(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    """A random matrix with rows of zeros, of one value, of tiny and of large ones."""
    w = rng.standard_normal((n, k), dtype=np.float32) * np.float32(0.1)
    for row, value in zip(rng.integers(0, n, 3), (0.0, 0.3, -2.0), strict=True):
        w[row] = value
    w[rng.integers(0, n)] *= np.float32(1e-6)
    w[rng.integers(0, n)] *= np.float32(1e4)
    return w


def integer_product(x: np.ndarray, w: Codes) -> np.ndarray:
    """Exact sums in each group, then float32 multiply-adds over the groups; float64 rounds but once."""
    codes, scales = quantise_rows(x)
    sums = np.einsum("rgk,ngk->grn", codes.astype(np.int32), w.codes.astype(np.int32))
    y = np.zeros((len(x), len(w.codes)), np.float32)
    for g, dots in enumerate(sums):
        scale = scales[:, g, None] * w.scales[None, :, g].astype(np.float32)
        y = (dots.astype(np.float64) * scale.astype(np.float64) + y).astype(np.float32)
    return y


@each_isa
@some
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 30) | st.sampled_from([96, 97, 200]),
    n=st.integers(1, 80),
    k=st.integers(1, 140) | st.sampled_from([576, 600]),
    form=st.sampled_from(FORMATS),
    source=st.sampled_from(plain.DTYPES),
    gated=st.booleans(),
    bias=st.booleans(),
    accumulate=st.booleans(),
    threads=st.sampled_from([1, 2]),
)
def test_codes_and_products_are_those_of_numpy(
    isa, seed, rows, n, k, form, source, gated, bias, accumulate, threads
):  # fmt: skip
    rng = np.random.default_rng(seed)
    ops = _cpu.Ops(isa, threads)
    weight = torch.from_numpy(awkward(rng, n * (1 + gated), k)).to(getattr(torch, source))
    b = plain.random(rng, n * (1 + gated)) if bias else None
    packed = ops.pack(*plain.bits(weight), form, gated=gated, bias=b)
    codes = quantise(weight.float().numpy(), form)
    floats = np.ascontiguousarray(codes.floats())
    assert packed.bytes == -(-n // 16) * (1 + gated) * panel_bytes(k, form)
    found = np.empty((n, k), np.float32)
    ops.unpack(packed, found)
    assert np.array_equal(found, floats[:n])

    x, start = plain.random(rng, rows, k), plain.random(rng, rows, n)
    accumulate = accumulate and not gated
    y = start.copy()
    ops.gemm(packed, x, y, accumulate)
    expected = start.copy()
    if form == "w8":
        sums = integer_product(x, codes) + (0 if b is None else b)
        if gated:
            ops.silu_mul(
                np.ascontiguousarray(sums[:, :n]).reshape(-1), np.ascontiguousarray(sums[:, n:]).reshape(-1),
                expected.reshape(-1),
            )  # fmt: skip
        else:
            expected = expected + sums if accumulate else sums
    else:
        ops.gemm(ops.pack(floats, "float32", "float32", gated=gated, bias=b), x, expected, accumulate)
    assert np.array_equal(y, expected)
    for row in {0, rows // 2, rows - 1}:
        alone = start[row : row + 1].copy()
        ops.gemm(packed, x[row : row + 1].copy(), alone, accumulate)
        assert np.array_equal(alone[0], y[row])


@each_isa
@some
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 40),
    blocks=st.integers(1, 5),
    kind=st.sampled_from(["Q4_0", "Q4_1", "Q8_0"]),
)
def test_gguf_blocks_run_as_they_are(isa, seed, n, blocks, kind):
    rng = np.random.default_rng(seed)
    k = 32 * blocks
    number = gguf.GGMLQuantizationType[kind]
    rows = gguf.quants.quantize(awkward(rng, n, k), number)
    expected = gguf.quants.dequantize(rows, number)
    ops = _cpu.Ops(isa, 2)
    found, y = np.empty((n, k), np.float32), np.empty((3, n), np.float32)
    packed = ops.pack(rows, kind, "q8" if kind == "Q8_0" else "q4", k=k)
    ops.unpack(packed, found)
    assert np.array_equal(found, expected)
    x, dense = plain.random(rng, 3, k), np.empty_like(y)
    ops.gemm(packed, x, y)
    ops.gemm(ops.pack(expected, "float32", "float32"), x, dense)
    assert np.array_equal(y, dense)
    for form in FORMATS:  # and they can be quantised anew
        if form != ("q8" if kind == "Q8_0" else "q4"):
            ops.unpack(ops.pack(rows, kind, form, k=k), found)
            assert np.array_equal(found, quantise(expected, form).floats())


@each_isa
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite(isa, form, value):
    """A weight is refused; an activation spoils its own row alone, and all of that."""
    ops = _cpu.Ops(isa, 1)
    w = np.ones((20, 70), np.float32)
    packed = ops.pack(w, "float32", form)
    for rows in (1, 2, 9):
        x = np.ones((rows, 70), np.float32)
        x[rows // 2, 69] = value
        y = np.zeros((rows, 20), np.float32)
        ops.gemm(packed, x, y)
        bad = ~np.isfinite(y)
        assert bad[rows // 2].all()
        assert bad.any(axis=1).sum() == 1
    w[7, 65] = value
    with pytest.raises(ValueError, match="not finite"):
        ops.pack(w, "float32", form)


def quantised(of, quantization: str, dtype: str = "float32", block_size: int = 16, threads: int = 1, isa: str = "",
              blocks: int = 64):  # fmt: skip
    made = native.NativeExecutor(of, dtype, block_size, threads, isa, formats(of, quantization))  # type: ignore[arg-type]
    made.load(as_weights(plain.weights(of)))
    made.allocate_kv(blocks)
    return made


@each_isa
@pytest.mark.parametrize("name", ["llama odd sizes", "mixed windows", "all biases, partial rope"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_logits_match_the_reference(isa, name, quantization):
    of = plain.SPECS[name]
    reference = ReferenceExecutor(of, "float32", 16, formats=formats(of, quantization))
    reference.load(as_weights(plain.weights(of)))
    reference.allocate_kv(4)
    table = np.random.default_rng(1).permutation(4).astype(np.int32)
    expected = plain.run_alone(reference, plain.some_tokens(60), table, 60)
    got = plain.run_alone(quantised(of, quantization, isa=isa), plain.some_tokens(60), table, 41)
    assert expected.abs().max() > 1
    if quantization == "w8a8":  # an activation on the edge of two codes may take the other one, a step of 1/127
        assert (got - expected).abs().mean() < 2e-3 * expected.abs().max()
        torch.testing.assert_close(got, expected, rtol=0, atol=0.05 * expected.abs().max().item())
    else:
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@each_isa
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama odd sizes", "qwen3"])
def test_logits_are_the_same_bits_however_they_are_computed(isa, name, quantization, dtype):
    """Alone, chunked, batched, in other blocks, of other sizes, on more threads."""
    of, length = plain.SPECS[name], 130
    tokens = plain.some_tokens(length)
    runner = quantised(of, quantization, dtype, isa=isa, blocks=32 * 20)
    table = np.arange(9, dtype=np.int32)
    alone = plain.run_alone(runner, tokens, table, length)
    assert alone.isfinite().all()
    for chunk in (1, 2, 7, 64):
        assert torch.equal(plain.run_alone(runner, tokens, table, chunk), alone), f"chunks of {chunk}"
    other = quantised(of, quantization, dtype, block_size=7, threads=2, isa=isa, blocks=64)
    assert torch.equal(plain.run_alone(other, tokens, np.arange(43, dtype=np.int32)[::-1].copy(), 130), alone)
    batched = plain.batch_of_32(quantised(of, quantization, dtype, threads=2, isa=isa, blocks=32 * 20), tokens)
    assert torch.equal(batched, alone), "in a batch"


@pytest.mark.skipif(len(plain.ISAS) < 2, reason="this CPU runs one build of the kernels")
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_every_build_gives_the_same_bits(quantization):
    table = np.arange(9, dtype=np.int32)
    of = plain.SPECS["qwen3"]
    first, *others = [
        plain.run_alone(quantised(of, quantization, isa=isa), plain.some_tokens(130), table, 64) for isa in plain.ISAS
    ]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("stored", ["Q4_0", "Q4_1", "Q8_0", "Q5_0"])
def test_a_gguf_file_as_stored_is_the_file_dequantised(kind: str, stored: str, tmp_path: Path) -> None:
    path = to_gguf(tiny_model(kind, tmp_path / "m"), tmp_path / "x.gguf", stored)
    spec = decoder_spec(read_config(path), 256)
    found, tokens, table = [], plain.some_tokens(40), np.arange(3, dtype=np.int32)
    for quantization in ("gguf", "none"):
        forms = weight_formats(path, spec, quantization)
        assert bool(forms) == (quantization == "gguf" and stored != "Q5_0")
        runner = native.NativeExecutor(spec, "float32", 16, 2, formats=forms)
        runner.load(weights(path, spec, 2))
        runner.allocate_kv(3)
        found.append(plain.run_alone(runner, tokens, table, 25))
    assert torch.equal(*found)


@pytest.mark.parametrize("quantization", ["gguf", "int4"])
def test_memory_while_a_gguf_file_is_loaded(quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is dequantised on the way is a small part of what is held."""
    from services.worker import loader

    largest = 0
    dequantise = loader.dequantise

    def counted(rows, kind, out, pool):
        nonlocal largest
        largest = max(largest, out.nbytes)
        dequantise(rows, kind, out, pool)

    monkeypatch.setattr(loader, "dequantise", counted)
    served = serve(smollm2(), "cpu", "bfloat16", quantization)
    assert largest < 0.1 * served.executor.weight_bytes()


def test_loading_names_the_weight_that_cannot_be_quantised() -> None:
    of = plain.SPECS["llama"]
    bad = plain.weights(of)
    bad["layers.1.up.weight"][3, 4] = torch.nan
    with pytest.raises(StartupError, match=r"layers\.1\.up\.weight .*not finite"):
        native.NativeExecutor(of, "float32", 16, 1, formats=formats(of, "int4")).load(as_weights(bad))


def test_blocks_of_another_size_are_refused() -> None:
    ops = _cpu.Ops("", 1)
    assert {kind.name: kind.size for kind in GGML_TYPES.values()}["Q4_1"] == 20
    with pytest.raises(ValueError, match="blocks"):
        ops.pack(np.zeros((2, 18), np.uint8), "Q4_1", "q4", k=32)
    with pytest.raises(ValueError, match="does not hold"):
        ops.pack(as_weight(torch.zeros(2, 20)), "Q4_1", "q4", k=32)


PROMPT = "1 4093 198 1780 314 260 3575 282 4649 47 2 198 1 520 9531 198"  # What is the capital of France?
ANSWER = [504, 3575, 282, 4649, 314, 7042, 30]  # The capital of France is Paris.
GREEDY = SamplingParams(temperature=0.0, max_tokens=7)


@pytest.mark.parametrize("quantization", [*QUANTIZATIONS, "gguf"])
def test_the_bundled_model_answers_alone_and_in_a_batch(quantization: str) -> None:
    served = serve(smollm2(), "cpu", "bfloat16", quantization)
    ids = [int(id) for id in PROMPT.split()]
    assert served.driver().generate([ids], GREEDY) == [ANSWER]
    prompts = [ids, ids[:9], ids * 5, ids[3:]]
    together = served.driver(seed=3).generate(prompts, GREEDY, chunk=5)
    assert together[0] == ANSWER
    assert together == [served.driver().generate([p], GREEDY)[0] for p in prompts]
