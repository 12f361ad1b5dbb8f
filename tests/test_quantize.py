"""Quantising in numpy: bounds on the error, exact cases, and which weights take which format."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.quantize import GROUP, Codes, Format, formats, quantise, quantise_rows
from tests.dense import make_spec

FORMATS: list[Format] = ["q8", "q4", "w8"]
some = settings(max_examples=30, deadline=None)
matrices = st.builds(
    lambda seed, n, k, scale, shift: (
        (np.random.default_rng(seed).standard_t(4, (n, k)) + shift).astype(np.float32) * np.float32(scale)
    ),
    seed=st.integers(0, 2**32),
    n=st.integers(1, 9),
    k=st.integers(1, 140),
    scale=st.sampled_from([1e-2, 1.0, 50.0]),
    shift=st.sampled_from([0.0, 3.0]),
)


def groups_of(values: np.ndarray, form: Format) -> list[np.ndarray]:
    return np.split(values, range(GROUP[form], values.shape[1], GROUP[form]), axis=1)


@some
@given(w=matrices, form=st.sampled_from(FORMATS))
def test_every_weight_is_within_half_a_step(w: np.ndarray, form: Format) -> None:
    """int4's fit may give up the ends of a group for the rest of it; then its squared error is below the range's."""
    found = quantise(w, form).floats()
    assert found.shape == w.shape
    for part, near in zip(groups_of(w, form), groups_of(found, form), strict=True):
        rounding = np.abs(part).max(axis=1) * 2.0**-10  # of the scale and the offset to float16
        if form == "q4":
            step = (part.max(axis=1) - part.min(axis=1)) / 15
            bound = part.shape[1] * (step / 2 + 2 * rounding) ** 2
            assert (((part - near) ** 2).sum(axis=1) <= bound + 1e-12).all()
        else:
            step = np.abs(part).max(axis=1) / 127
            assert (np.abs(part - near).max(axis=1) <= step / 2 + rounding + 1e-7).all()


@some
@given(
    seed=st.integers(0, 2**32), n=st.integers(1, 5), groups=st.integers(1, 4), form=st.sampled_from(FORMATS)
)  # fmt: skip
def test_what_a_format_can_hold_is_held_exactly(seed: int, n: int, groups: int, form: Format) -> None:
    rng = np.random.default_rng(seed)
    group, most = GROUP[form], 15 if form == "q4" else 127
    codes = rng.integers(0 if form == "q4" else -most, most + 1, (n, groups, group)).astype(np.int8)
    codes[..., 0], codes[..., 1] = most, 0  # the whole range is used, as a quantiser makes it
    scales = np.exp2(rng.integers(-9, 3, (n, groups))).astype(np.float16)
    offsets = (scales * rng.integers(-16, 1, (n, groups))).astype(np.float16) if form == "q4" else None
    exact = Codes(form, codes, scales, offsets, groups * group).floats()
    assert np.array_equal(quantise(exact, form).floats(), exact)


@pytest.mark.parametrize("form", FORMATS)
def test_zeros_constants_and_extremes(form: Format) -> None:
    w = np.zeros((4, 70), np.float32)
    w[1], w[2], w[3] = 0.375, 1e-30, 1e38
    found = quantise(w, form).floats()
    assert np.array_equal(found[0], w[0])
    assert np.abs(found[1] - w[1]).max() < 1e-3
    assert (np.abs(found[2]) < 1e-7).all()
    assert np.isfinite(found[3]).all()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(form: Format, value: float) -> None:
    w = np.zeros((2, 64), np.float32)
    w[1, 5] = value
    with pytest.raises(ValueError, match="not finite"):
        quantise(w, form)


def test_the_fit_of_int4_beats_the_range() -> None:
    w = np.random.default_rng(0).standard_normal((500, 64), dtype=np.float32)
    low, high = (f(w.reshape(500, 2, 32), axis=2, keepdims=True) for f in (np.min, np.max))
    step = (high - low) / 15
    plain = (np.rint((w.reshape(500, 2, 32) - low) / step) * step + low).reshape(500, 64)
    fitted = quantise(w, "q4").floats()
    assert ((fitted - w) ** 2).sum() < 0.9 * ((plain - w) ** 2).sum()


@some
@given(x=matrices)
def test_activations_are_within_half_a_step(x: np.ndarray) -> None:
    codes, scales = quantise_rows(x)
    assert np.abs(codes.astype(int)).max() <= 127
    found = (codes * scales[..., None]).reshape(len(x), -1)[:, : x.shape[1]]
    for part, near in zip(groups_of(x, "w8"), groups_of(found, "w8"), strict=True):
        assert (np.abs(part - near) <= np.abs(part).max(axis=1, keepdims=True) * (0.501 / 127)).all()


def test_formats_of_each_quantization() -> None:
    spec = make_spec(qkv_bias=True)
    matrices = {name for name, shape in spec.weight_shapes().items() if len(shape) == 2}
    for quantization, layers, ends in (("int8", "q8", "q8"), ("int4", "q4", "q8"), ("w8a8", "w8", "w8")):
        found = formats(spec, quantization)
        assert set(found) == matrices
        assert {found[name] for name in matrices if name.startswith("layers.")} == {layers}
        assert found["embed.weight"] == found["lm_head.weight"] == ends
    assert formats(spec, "none") == {}


def test_formats_of_a_gguf_file_follow_what_it_holds() -> None:
    spec = make_spec()
    kinds = dict.fromkeys(spec.weight_shapes(), "Q4_1") | {"embed.weight": "Q8_0", "lm_head.weight": "Q6_K"}
    kinds |= {"layers.0.v.weight": "Q8_0", "layers.1.gate.weight": "Q4_0", "layers.1.down.weight": "F16"}
    found = formats(spec, "gguf", kinds)
    assert found["embed.weight"] == "q8"
    assert "lm_head.weight" not in found
    assert {found[f"layers.1.{part}.weight"] for part in ("q", "k", "v", "o", "gate", "up")} == {"q4"}
    assert not {"layers.1.down.weight", "layers.1.attn_norm.weight"} & set(found)
    assert not {f"layers.0.{part}.weight" for part in "qkv"} & set(found)  # fused, and not all of one format
