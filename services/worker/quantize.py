"""Quantised weights: which weights take which format, and the arithmetic of the formats in numpy.

The native kernels (`csrc/cpu/quantize.cpp`, `w8a8.cpp`) compute the same codes and scales bit for bit; this is their
oracle, and what the reference backend runs with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from services.worker.spec import DecoderSpec

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]
Format = Literal["q8", "q4", "w8"]
Formats = Mapping[str, Format]  # by canonical weight name; a matrix that has none is held in the model's dtype

GROUP: dict[Format, int] = {"q8": 32, "q4": 32, "w8": 64}  # weights along a row that share a scale
PANEL = 16  # outputs that the native kernels hold together
MAX_HALF = np.float32(65504)
REFITS = 3
BLOCK_FORMATS: dict[str, Format] = {"Q4_0": "q4", "Q4_1": "q4", "Q8_0": "q8"}  # GGUF's, as they are stored


@dataclass(frozen=True)
class Codes:
    """A quantised matrix [n, k]: a weight is scale * code + offset, of the group of its row that it lies in."""

    format: Format
    codes: NDArray[np.int8]  # [n, groups, group], zero past k; 0 to 15 in q4
    scales: Halves  # [n, groups]
    offsets: Halves | None  # [n, groups] in q4
    k: int

    def floats(self) -> Floats:
        """The weights as float32 [n, k]."""
        values = self.codes.astype(np.float32) * _wide(self.scales)[..., None]
        if self.offsets is not None:
            values += _wide(self.offsets)[..., None]
        return values.reshape(len(values), -1)[:, : self.k]


def formats(spec: DecoderSpec, quantization: str, stored: Mapping[str, str] | None = None) -> dict[str, Format]:
    """The format of each quantised matrix under `--quantization`.

    `stored`: for "gguf", the type that the file holds each weight in. What it holds in no type that can be run as it
    is (K-quants, floats) is left out, as are matrices that are fused with one of another format.
    """
    matrices = [name for name, shape in spec.weight_shapes().items() if len(shape) == 2]
    if quantization == "gguf":
        kinds = stored or {}
        found = {name: BLOCK_FORMATS[kinds[name]] for name in matrices if kinds.get(name) in BLOCK_FORMATS}
        for i in range(spec.num_layers):
            for fused in (("q", "k", "v"), ("gate", "up")):
                names = [f"layers.{i}.{part}.weight" for part in fused]
                if len({found.get(name) for name in names}) > 1:
                    for name in names:
                        found.pop(name, None)
        return found
    chosen: dict[str, tuple[Format, Format]] = {"int8": ("q8", "q8"), "int4": ("q4", "q8"), "w8a8": ("w8", "w8")}
    if quantization not in chosen:
        return {}
    layers, ends = chosen[quantization]
    return {name: layers if name.startswith("layers.") else ends for name in matrices}


def panel_bytes(k: int, form: Format) -> int:
    """Bytes of sixteen outputs in the native kernels."""
    groups = -(-k // GROUP[form])
    size = groups * (PANEL * 2 * (2 if form == "q4" else 1) + GROUP[form] * PANEL // (2 if form == "q4" else 1))
    return -(-size // 64) * 64


def quantise(values: Floats, form: Format) -> Codes:
    """A matrix [n, k] in groups of `GROUP[form]` along k. Raises ValueError for values that are not finite."""
    if not np.isfinite(values).all():
        raise ValueError("a value that is not finite cannot be quantised")
    group = GROUP[form]
    n, k = values.shape
    groups = -(-k // group)
    padded = np.zeros((n, groups * group), np.float32)
    padded[:, :k] = values
    counts = np.full(groups, group)
    counts[-1] = k - (groups - 1) * group
    grouped = padded.reshape(n, groups, group)
    inside = np.arange(group) < counts[:, None]  # [groups, group]
    if form == "q4":
        with np.errstate(over="ignore", invalid="ignore"):  # of sums of squares; such a fit is not taken
            scales, offsets = _fit_q4(grouped, inside)
        codes = _codes4(grouped, _wide(scales), _wide(offsets))
        return Codes(form, np.where(inside, codes, 0).astype(np.int8), scales, offsets, k)
    scales = _half(np.abs(grouped).max(axis=2) / np.float32(127))
    wide = _wide(scales)[..., None]
    codes = np.clip(np.rint(grouped / _divisor(wide)), -127, 127)
    return Codes(form, np.where(wide > 0, codes, 0).astype(np.int8), scales, None, k)


def quantise_rows(x: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Activations [rows, k] to codes [rows, groups, 64] and scales [rows, groups], as w8a8 does before each product."""
    group = GROUP["w8"]
    rows, k = x.shape
    groups = -(-k // group)
    padded = np.zeros((rows, groups * group), np.float32)
    padded[:, :k] = x
    grouped = padded.reshape(rows, groups, group)
    top = np.abs(grouped).max(axis=2)
    some = top >= np.float32(1e-30)
    inverse = np.where(some, np.float32(127) / np.where(some, top, np.float32(1)), np.float32(0))
    codes = np.rint(grouped * inverse[..., None]).astype(np.int8)
    return codes, np.where(some, top / np.float32(127), np.float32(0))


def _wide(halves: Halves) -> Floats:
    return halves.astype(np.float32)


def _half(values: Floats) -> Halves:
    return np.clip(values, -MAX_HALF, MAX_HALF).astype(np.float16)


def _divisor(scale: Floats) -> Floats:
    return np.where(scale != 0, scale, np.float32(1))


def _codes4(w: Floats, scales: Floats, offsets: Floats) -> Floats:
    quotients = (w - offsets[..., None]) / _divisor(scales)[..., None]
    return np.clip(np.rint(quotients), np.float32(0), np.float32(15))


def _fit_q4(w: Floats, inside: NDArray[np.bool_]) -> tuple[Halves, Halves]:
    """Scale and offset of each group: its range, or a least-squares fit to the codes where that errs less.

    Starts from scale = (max - min) / 15 and alternates codes and fit REFITS times; sums run along k in order.
    """
    low = np.where(inside, w, np.float32(np.inf)).min(axis=2)
    high = np.where(inside, w, np.float32(-np.inf)).max(axis=2)
    n = inside.sum(axis=1).astype(np.float32)
    scales, offsets = _half((high - low) / np.float32(15)), _half(low)
    best = scales, offsets
    error, sums = _assess(w, inside, scales, offsets)
    for _ in range(REFITS):
        q, qq, sw, wq = sums
        spread = n * qq - q * q
        scale = np.where(spread > 0, (n * wq - sw * q) / _divisor(spread), np.float32(0))
        offset = (sw - scale * q) / n
        scales, offsets = _half(scale), _half(offset)
        another, sums = _assess(w, inside, scales, offsets)
        better = another < error
        best = np.where(better, scales, best[0]), np.where(better, offsets, best[1])
        error = np.minimum(another, error)
    return best


def _assess(
    w: Floats, inside: NDArray[np.bool_], scales: Halves, offsets: Halves
) -> tuple[Floats, tuple[Floats, Floats, Floats, Floats]]:
    """Squared error, and the sums over k of code, code squared, weight, and weight times code."""
    d, m = _wide(scales), _wide(offsets)
    codes = _codes4(w, d, m)
    off = w - (d[..., None] * codes + m[..., None])
    return _sum(off * off, inside), tuple(_sum(x, inside) for x in (codes, codes * codes, w, w * codes))  # type: ignore[return-value]


def _sum(x: Floats, inside: NDArray[np.bool_]) -> Floats:
    total = np.zeros(x.shape[:-1], np.float32)
    for i in range(x.shape[-1]):
        total = np.where(inside[:, i], total + x[..., i], total)
    return total
