"""The native kernels against torch, the native executor against the reference, and its promise of the same bits."""

from __future__ import annotations

import dataclasses
import json
import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker import native
from services.worker.executor import Ints, StepBatch
from services.worker.reference import ReferenceExecutor
from services.worker.spec import DecoderSpec, RopeSpec
from shared.errors import StartupError
from tests.weights import as_weight, as_weights

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
if native.unavailable() is None:
    from services.worker import _cpu

ISAS = _cpu.runnable_isas() if native.unavailable() is None else ["none"]
DTYPES = ["float32", "bfloat16", "float16"]
EPSILON = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}
each_isa = pytest.mark.parametrize("isa", ISAS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
some = settings(max_examples=25, deadline=None)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def bits(tensor: torch.Tensor) -> tuple[np.ndarray, str]:
    return native._bits(as_weight(tensor))


def random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


# Single kernels


@each_isa
@some
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 30) | st.sampled_from([96, 97, 200]),
    n=st.integers(1, 80),
    k=st.integers(1, 70) | st.sampled_from([1023, 1024, 1500]),
    dtype=st.sampled_from(DTYPES),
    gated=st.booleans(),
    bias=st.booleans(),
    accumulate=st.booleans(),
    threads=st.sampled_from([1, 2]),
)
def test_gemm_matches_torch_and_each_row_has_its_own_bits(
    isa, seed, rows, n, k, dtype, gated, bias, accumulate, threads
):
    rng = np.random.default_rng(seed)
    ops = _cpu.Ops(isa, threads)
    weight = torch.from_numpy(random(rng, n * (1 + gated), k) * np.float32(k**-0.5)).to(getattr(torch, dtype))
    b = random(rng, n * (1 + gated)) if bias else None
    w = ops.pack(*bits(weight), dtype, gated=gated, bias=b)
    x, start = random(rng, rows, k), random(rng, rows, n)
    accumulate = accumulate and not gated

    y = start.copy()
    ops.gemm(w, x, y, accumulate)

    taken = torch.from_numpy(x)
    if native.rounds_activations(isa, dtype):
        taken = taken.bfloat16()
    wide = taken.double() @ weight.double().T
    if bias:
        wide += torch.from_numpy(b).double()
    if gated:
        wide = torch.nn.functional.silu(wide[:, :n]) * wide[:, n:]
    if accumulate:
        wide += torch.from_numpy(start).double()
    np.testing.assert_allclose(y, wide.numpy(), rtol=3e-5, atol=3e-5)
    for row in {0, rows // 2, rows - 1}:
        alone = start[row : row + 1].copy()
        ops.gemm(w, x[row : row + 1].copy(), alone, accumulate)
        assert np.array_equal(alone[0], y[row])


@each_isa
@each_dtype
def test_packing_rounds_float32_to_nearest_even(isa, dtype):
    edges = [0.0, -0.0, 1e-8, 1.00390625, 1.01171875, 65519.0, 3.4e38]
    if not native.rounds_activations(isa, dtype):  # its products take denormals for zero
        edges += [1e-40, -2e-45]
    values = torch.cat((torch.randn(500), torch.tensor(edges)))
    y = columns_of(isa, values[:, None], dtype)
    assert torch.equal(y[:, 0], values.to(getattr(torch, dtype)).float())


@each_isa
@each_dtype
def test_packing_keeps_what_is_no_number(isa, dtype):
    odd = torch.tensor([np.nan, np.inf, -np.inf, np.float32(np.uint32(0x7F800001).view(np.float32))]).repeat(5)
    y = columns_of(isa, odd[:, None].contiguous(), dtype)[:, 0]
    assert torch.equal(y.isnan(), odd.isnan())
    assert torch.equal(y[~odd.isnan()], odd[~odd.isnan()])


@each_isa
@some
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 70),
    k=st.integers(1, 40) | st.sampled_from([128, 131, 300]),
    source=st.sampled_from(DTYPES),
    dtype=st.sampled_from(DTYPES),
    gated=st.booleans(),
)
def test_packing_puts_every_weight_in_its_place(isa, seed, n, k, source, dtype, gated):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-128, 128, (2 * n if gated else n, k), generator=generator).to(getattr(torch, source))
    y = columns_of(isa, weight, dtype, gated)
    if gated:
        gate, up = weight.double().split(n)
        np.testing.assert_allclose(y, torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(y, weight.float())


def columns_of(isa: str, weight: torch.Tensor, dtype: str, gated: bool = False) -> torch.Tensor:
    """A packed matrix's columns, [n, k], as products with the unit vectors bring them out; gated ones pairwise."""
    k = weight.shape[1]
    ops = _cpu.Ops(isa, 2)
    w = ops.pack(*bits(weight), dtype, gated=gated)
    y = np.empty((k, len(weight) // (1 + gated)), np.float32)
    ops.gemm(w, np.eye(k, dtype=np.float32), y)
    return torch.from_numpy(y).T


@pytest.mark.skipif("avx512_bf16" not in ISAS, reason="this CPU lacks AVX-512 BF16")
@some
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 40), k=st.integers(1, 700))
def test_bf16_products_round_the_activations_and_sum_in_float32(seed, rows, k):
    """Sums of few whole numbers are exact, and 257 is none of bfloat16's."""
    rng = np.random.default_rng(seed)
    ops = _cpu.Ops("avx512_bf16", 2)
    weight = torch.from_numpy(rng.integers(-8, 9, (33, k)).astype(np.float32)).bfloat16()
    x = rng.integers(-8, 9, (rows, k)).astype(np.float32)
    x[:, 0] = 257
    y = np.empty((rows, 33), np.float32)
    ops.gemm(ops.pack(*bits(weight), "bfloat16"), x, y)
    x[:, 0] = 256
    assert np.array_equal(y, (torch.from_numpy(x) @ weight.float().T).numpy())


@each_isa
@some
@given(
    seed=st.integers(0, 2**32), rows=st.integers(1, 20), n=st.integers(1, 100), scale=st.sampled_from([1e-3, 1.0, 1e3])
)
def test_rms_norm_matches_torch(isa, seed, rows, n, scale):
    rng = np.random.default_rng(seed)
    x, weight = random(rng, rows, n) * np.float32(scale), random(rng, n)
    y = np.empty_like(x)
    _cpu.Ops(isa, 2).rms_norm(x, weight, y, 1e-5)
    expected = torch.nn.functional.rms_norm(
        torch.from_numpy(x).double(), (n,), torch.from_numpy(weight).double(), eps=1e-5
    )
    np.testing.assert_allclose(y, expected.numpy(), rtol=2e-6, atol=1e-7)


@each_isa
@pytest.mark.parametrize("n", [1, 15, 16, 17, 4001])
def test_silu_mul_matches_torch(isa, n):
    gate = np.linspace(-120, 120, n, dtype=np.float32)
    up = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
    y = np.empty_like(gate)
    _cpu.Ops(isa, 1).silu_mul(gate, up, y)
    expected = torch.nn.functional.silu(torch.from_numpy(gate).double()) * torch.from_numpy(up).double()
    np.testing.assert_allclose(y, expected.numpy(), rtol=1e-6, atol=1e-30)


@each_isa
def test_silu_of_what_is_no_number_is_none(isa):
    gate = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38], np.float32)
    y = np.empty_like(gate)
    _cpu.Ops(isa, 1).silu_mul(gate, np.ones_like(gate), y)
    assert np.isnan(y[0])
    assert list(y[[1, 3]]) == [np.inf, np.float32(3e38)]
    assert y[4] == 0


# The executor


def rope(dim: int, factor: float = 1.0) -> RopeSpec:
    return RopeSpec(dim, tuple(float(np.float32(1000.0 ** (-2 * i / dim))) for i in range(dim // 2)), factor)


def spec(**changes: object) -> DecoderSpec:
    fields = {
        "architecture": "Test",
        "vocab_size": 101,
        "hidden_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 72,
        "norm_eps": 1e-5,
        "rope": rope(16),
        "windows": (0, 0),
        "attention_scale": 0.25,
        "max_position": 4096,
        "tie_embeddings": True,
    }
    return DecoderSpec(**(fields | changes))  # type: ignore[arg-type]


SPECS = {
    "llama": spec(),
    "llama odd sizes": spec(hidden_size=45, head_dim=12, rope=rope(12), intermediate_size=33, tie_embeddings=False),
    "mistral": spec(windows=(20, 20), tie_embeddings=False),
    "mixed windows": spec(windows=(0, 7), num_heads=6, num_kv_heads=1),
    "qwen2": spec(qkv_bias=True),
    "qwen3": spec(qk_norm=True, head_dim=32, rope=rope(32)),
    "gemma": spec(attention_softcap=2.0, final_logit_softcap=3.0, windows=(0, 20)),
    "all biases, partial rope": spec(qkv_bias=True, o_bias=True, mlp_bias=True, rope=rope(8, 1.3), num_kv_heads=4),
}


def weights(of: DecoderSpec, dtype: str = "float32") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    made = {}
    for name, shape in of.weight_shapes().items():
        w = torch.randn(shape, generator=generator) * 0.2
        made[name] = (w + 1 if "norm" in name else w).to(getattr(torch, dtype))
    return made


def executor(
    of: DecoderSpec, dtype: str = "float32", block_size: int = 16, threads: int = 1, isa: str = "", blocks: int = 64
):
    made = native.NativeExecutor(of, dtype, block_size, threads, isa)  # type: ignore[arg-type]
    made.load(as_weights(weights(of)))
    made.allocate_kv(blocks)
    return made


@dataclass
class Sequence:
    tokens: Ints
    table: Ints
    done: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)  # of every token, in order


def logits_of(runner, batch: StepBatch) -> torch.Tensor:
    return torch.from_numpy(runner.forward(batch).copy())  # they are the executor's until its next step


def step(runner, parts: list[tuple[Sequence, int]]) -> None:
    """Computes the next `count` tokens of each sequence in one step."""
    counts = [count for _, count in parts]
    total = sum(counts)
    width = max(len(s.table) for s, _ in parts)
    tables = np.full((len(parts), width), 2**31 - 1, np.int32)  # past a table's end: anything
    for i, (s, _) in enumerate(parts):
        tables[i, : len(s.table)] = s.table
    logits = logits_of(
        runner,
        StepBatch(
            tokens=np.concatenate([s.tokens[s.done : s.done + n] for s, n in parts]).astype(np.int32),
            positions=np.concatenate([np.arange(s.done, s.done + n) for s, n in parts]).astype(np.int32),
            query_start=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            context_lens=np.array([s.done + n for s, n in parts], np.int32),
            block_tables=tables,
            logit_rows=np.arange(total, dtype=np.int32),
        ),
    )
    for (s, n), own in zip(parts, logits.split(counts), strict=True):
        s.logits.append(own)
        s.done += n


def run_alone(runner, tokens: Ints, table: Ints, chunk: int) -> torch.Tensor:
    """Logits of all tokens, computed `chunk` at a time."""
    s = Sequence(tokens, table)
    while s.done < len(tokens):
        step(runner, [(s, min(chunk, len(tokens) - s.done))])
    return torch.cat(s.logits)


def some_tokens(count: int, seed: int = 0) -> Ints:
    return np.random.default_rng(seed).integers(0, 101, count, dtype=np.int32)


@each_isa
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_float32_logits_match_the_reference(isa, name, block_size):
    of = SPECS[name]
    reference = ReferenceExecutor(of, "float32", block_size)
    reference.load(as_weights(weights(of)))
    blocks = -(-150 // block_size)
    reference.allocate_kv(blocks)
    table = np.random.default_rng(1).permutation(blocks).astype(np.int32)
    expected = run_alone(reference, some_tokens(150), table, 150)
    got = run_alone(executor(of, block_size=block_size, threads=2, isa=isa, blocks=blocks), some_tokens(150), table, 41)
    assert expected.abs().max() > 1
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@each_isa
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_rounds_weights_and_cache_only(isa, dtype):
    """Against a float32 reference with the same rounded weights, what is left is the cache's rounding."""
    of = SPECS["qwen3"]
    reference = ReferenceExecutor(of, "float32", 16)
    rounded = {k: v if "norm" in k else v.to(getattr(torch, dtype)).float() for k, v in weights(of).items()}
    reference.load(as_weights(rounded))
    reference.allocate_kv(4)
    table = np.arange(4, dtype=np.int32)
    expected = run_alone(reference, some_tokens(60), table, 60)
    got = run_alone(executor(of, dtype, isa=isa), some_tokens(60), table, 60)
    rounded_more = 3 if native.rounds_activations(isa or ISAS[0], dtype) else 1
    torch.testing.assert_close(got, expected, rtol=0, atol=30 * EPSILON[dtype] * rounded_more)


@each_isa
@each_dtype
@pytest.mark.parametrize("name", ["llama odd sizes", "mixed windows", "qwen3", "gemma"])
def test_logits_are_the_same_bits_however_they_are_computed(isa, dtype, name):
    """Alone, chunked, batched, in other blocks, of other sizes, on more threads."""
    of, length = SPECS[name], 300
    tokens = some_tokens(length)
    runner = executor(of, dtype, isa=isa, blocks=32 * 20)
    table = np.arange(19, dtype=np.int32)
    alone = run_alone(runner, tokens, table, length)
    assert alone.isfinite().all()
    for chunk in (1, 7, 16, 64):
        assert torch.equal(run_alone(runner, tokens, table, chunk), alone), f"chunks of {chunk}"
    shuffled = np.random.default_rng(5).permutation(600)[:19].astype(np.int32)
    assert torch.equal(run_alone(runner, tokens, shuffled, 64), alone), "other blocks"
    for block_size in (7, 64):
        other = executor(of, dtype, block_size=block_size, threads=2, isa=isa, blocks=64)
        assert torch.equal(run_alone(other, tokens, np.arange(43, dtype=np.int32), 300), alone), (
            f"blocks of {block_size}"
        )
    assert torch.equal(batch_of_32(executor(of, dtype, threads=2, isa=isa, blocks=32 * 20), tokens), alone), (
        "in a batch"
    )


def batch_of_32(runner, tokens: Ints) -> torch.Tensor:
    """Logits of `tokens` computed in uneven chunks beside 31 others at other places."""
    rng = np.random.default_rng(3)
    blocks = rng.permutation(32 * 20).astype(np.int32).reshape(32, 20)
    sequences = [Sequence(tokens, blocks[0])]
    sequences += [Sequence(some_tokens(int(rng.integers(1, 300)), seed=i), blocks[i]) for i in range(1, 32)]
    while any(s.done < len(s.tokens) for s in sequences):
        live = [s for s in sequences if s.done < len(s.tokens)]
        rng.shuffle(live)
        step(runner, [(s, min(len(s.tokens) - s.done, int(rng.choice([1, 1, 5, 90])))) for s in live])
    return torch.cat(sequences[0].logits)


@pytest.mark.skipif(len(ISAS) < 2, reason="this CPU runs one build of the kernels")
@each_dtype
def test_every_build_gives_the_same_bits(dtype):
    table = np.arange(19, dtype=np.int32)
    alike = [isa for isa in ISAS if not native.rounds_activations(isa, dtype)]
    first, *others = [run_alone(executor(SPECS["qwen3"], dtype, isa=isa), some_tokens(300), table, 64) for isa in alike]
    assert all(torch.equal(first, other) for other in others)


def test_only_the_rows_asked_for_have_logits_and_the_order_is_theirs():
    runner = executor(SPECS["llama"])
    tokens, table = some_tokens(20), np.arange(2, dtype=np.int32)
    all_rows = run_alone(runner, tokens, table, 20)
    batch = plain_batch(tokens, table)
    batch.logit_rows = np.array([19, 3, 3], np.int32)
    assert torch.equal(logits_of(runner, batch), all_rows[[19, 3, 3]])
    batch.logit_rows = np.array([], np.int32)
    assert runner.forward(batch).shape == (0, 101)


def plain_batch(tokens: Ints, table: Ints) -> StepBatch:
    """All of a sequence's tokens in one step, logits of the last."""
    n = len(tokens)
    return StepBatch(
        tokens=tokens,
        positions=np.arange(n, dtype=np.int32),
        query_start=np.array([0, n], np.int32),
        context_lens=np.array([n], np.int32),
        block_tables=table[None],
        logit_rows=np.array([n - 1], np.int32),
    )


def test_copied_blocks_continue_like_their_source():
    runner = executor(SPECS["mistral"], "bfloat16")
    tokens = some_tokens(40)
    expected = run_alone(runner, tokens, np.array([3, 1, 2], np.int32), 40)[39]
    runner.copy_blocks([(3, 10), (1, 11), (2, 2), (2, 12)])
    run_alone(runner, some_tokens(48, seed=9), np.array([3, 1, 2], np.int32), 48)
    copy = Sequence(tokens, np.array([10, 11, 12], np.int32), done=39)
    step(runner, [(copy, 1)])
    assert torch.equal(copy.logits[0][0], expected)


def test_executors_of_one_process_run_side_by_side():
    table = np.arange(19, dtype=np.int32)
    runners = [executor(SPECS["llama"], threads=2) for _ in range(2)]
    expected = run_alone(runners[0], some_tokens(300), table, 64)
    found: list[torch.Tensor] = []
    threads = [
        threading.Thread(target=lambda r=r: found.append(run_alone(r, some_tokens(300), table, 5))) for r in runners
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert all(torch.equal(logits, expected) for logits in found)


def test_weight_dtypes_of_the_checkpoint_do_not_matter_where_they_hold_the_same_values():
    of = SPECS["qwen2"]
    exact = {k: v.to(torch.bfloat16) for k, v in weights(of).items()}
    table = np.arange(2, dtype=np.int32)
    logits = []
    for source in (torch.bfloat16, torch.float32):
        runner = native.NativeExecutor(of, "bfloat16", 16, 1)
        runner.load(as_weights({k: v.to(source) for k, v in exact.items()}))
        runner.allocate_kv(2)
        logits.append(run_alone(runner, some_tokens(20), table, 20))
    assert torch.equal(logits[0], logits[1])


def test_memory_is_what_weights_and_blocks_need():
    of = SPECS["llama"]
    runner = executor(of, "bfloat16")
    assert runner.block_bytes() == 2 * 2 * 2 * 16 * 16 * 2  # layers, k and v, kv heads, head_dim, block size, bytes
    matrices = sum(int(np.prod(shape)) for shape in of.weight_shapes().values() if len(shape) == 2)
    assert 1 <= runner.weight_bytes() / (2 * matrices) < 1.1  # the tied head is stored once


# Bad input


def test_loading_names_the_weight_at_fault():
    of = SPECS["llama"]
    for change, message in [
        ({"layers.9.q.weight": torch.zeros(1)}, "layers.9.q.weight"),
        ({"lm_head.weight": torch.zeros(101, 48)}, "lm_head.weight"),
        ({"layers.1.o.weight": torch.zeros(48, 65)}, r"layers.1.o.weight has shape \(48, 65\).* \[48, 64\]"),
        ({"final_norm.weight": torch.zeros(3)}, "final_norm.weight"),
    ]:
        runner = native.NativeExecutor(of, "float32", 16, 1)
        with pytest.raises(StartupError, match=message):
            runner.load(as_weights(weights(of) | change))
    lacking = weights(of)
    del lacking["layers.1.up.weight"]
    with pytest.raises(StartupError, match=r"layers\.1\.up\.weight"):
        native.NativeExecutor(of, "float32", 16, 1).load(as_weights(lacking))


@pytest.mark.parametrize(
    "change",
    [
        {"num_kv_heads": 3},
        {"windows": (0,)},
        {"windows": (0, -1)},
        {"rope": rope(32)},
        {"hidden_size": 0},
        {"activation": "gelu"},
        {"attention_softcap": -1.0},
        {"final_logit_softcap": -1.0},
    ],
)
def test_a_spec_that_is_no_decoder_is_refused(change):
    with pytest.raises(StartupError):
        native.NativeExecutor(spec(**change), "float32", 16, 1)


@pytest.mark.parametrize(
    ("dtype", "block_size", "threads", "isa"),
    [
        ("int8", 16, 1, ""),
        ("float32", 0, 1, ""),
        ("float32", 257, 1, ""),
        ("float32", 16, 0, ""),
        ("float32", 16, 1, "mmx"),
    ],
)
def test_a_setting_out_of_range_is_refused(dtype, block_size, threads, isa):
    with pytest.raises(StartupError):
        native.NativeExecutor(SPECS["llama"], dtype, block_size, threads, isa)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": np.full(20, 101, np.int32)},
        {"tokens": np.full(20, -1, np.int32)},
        {"tokens": np.zeros(19, np.int32)},
        {"positions": np.arange(1, 21, dtype=np.int32)},
        {"positions": np.zeros(20, np.int32)},
        {"positions": np.arange(19, dtype=np.int32)},
        {"query_start": np.array([0, 19], np.int32)},
        {"query_start": np.array([0, 30, 20], np.int32)},
        {"query_start": np.array([20], np.int32)},
        {"query_start": np.array([], np.int32)},
        {"context_lens": np.array([19], np.int32)},
        {"context_lens": np.array([2**31 - 1], np.int32)},
        {"context_lens": np.array([20, 20], np.int32)},
        {"block_tables": np.array([[0]], np.int32)},
        {"block_tables": np.array([[0, 64]], np.int32)},
        {"block_tables": np.array([[-1, 0]], np.int32)},
        {"block_tables": np.zeros((2, 2), np.int32)},
        {"logit_rows": np.array([20], np.int32)},
        {"logit_rows": np.array([-1], np.int32)},
    ],
    ids=repr,
)
def test_a_batch_that_is_none_is_refused_and_changes_nothing(change):
    runner = executor(SPECS["llama"])
    tokens, table = some_tokens(20), np.arange(2, dtype=np.int32)
    expected = logits_of(runner, plain_batch(tokens, table))
    batch = plain_batch(tokens, table)
    for name, value in change.items():
        setattr(batch, name, value)
    with pytest.raises(ValueError):
        runner.forward(batch)
    assert torch.equal(logits_of(runner, plain_batch(tokens, table)), expected)


def test_arrays_of_another_type_are_refused():
    runner = executor(SPECS["llama"])
    batch = plain_batch(some_tokens(20), np.arange(2, dtype=np.int32))
    batch.tokens = batch.tokens.astype(np.int64)
    with pytest.raises(TypeError):
        runner.forward(batch)
    with pytest.raises(ValueError, match="does not hold float32"):
        _cpu.Ops("", 1).pack(np.zeros((2, 2), np.int16), "float32", "float32")


def test_steps_before_weights_or_cache_are_refused():
    batch = plain_batch(some_tokens(20), np.arange(2, dtype=np.int32))
    runner = native.NativeExecutor(SPECS["llama"], "float32", 16, 1)
    with pytest.raises(ValueError, match="weights"):
        runner.forward(batch)
    runner.load(as_weights(weights(SPECS["llama"])))
    with pytest.raises(ValueError, match="block 0 does not exist"):
        runner.forward(batch)
    with pytest.raises(ValueError, match="block 0 does not exist"):
        runner.copy_blocks([(0, 1)])
    with pytest.raises(ValueError):
        runner.allocate_kv(-1)


def test_an_empty_step_is_one():
    empty = np.array([], np.int32)
    batch = StepBatch(empty, empty, np.array([0], np.int32), empty, np.empty((0, 0), np.int32), empty)
    assert executor(SPECS["llama"]).forward(batch).shape == (0, 101)


def test_the_benchmark_prints_shares_of_the_limits(monkeypatch, capsys):
    from bench import kernels

    small = dataclasses.replace(kernels.SMOLLM2, num_layers=1, windows=(0,), vocab_size=2048)
    monkeypatch.setattr(kernels, "SMOLLM2", small)
    monkeypatch.setattr(kernels, "GEMM_ROWS", (1, 8))
    monkeypatch.setattr(kernels, "CONTEXTS", (256,))
    monkeypatch.setattr(kernels, "STEPS", ((1, 16), (16, 16)))
    monkeypatch.setattr(kernels.Clock, "SECONDS", 0.01)
    kernels.main(["--threads", "1", "--cpu-time"])
    result = json.loads(capsys.readouterr().out)
    assert len(result["lines"]) == 6
    assert all(line["share"] > 0 for line in result["lines"])
