"""GGUF's quantised tensors as float32, bit for bit as the `gguf` package computes them, in pieces that fit the cache.

Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.gguf_file import GGMLType

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Kernel = Callable[[Bytes, Floats], None]  # blocks [n, bytes of a block], out [n, elements of a block]

PIECE = 1 << 16  # elements dequantised at once, so that they stay in the cache
LOW_HALVES = np.uint64(0x0F0F0F0F0F0F0F0F)


def dequantise(rows: Bytes, kind: GGMLType, out: Floats, pool: ThreadPoolExecutor | None = None) -> None:
    """Rows of whole blocks [rows, bytes] to `out` [rows, elements], by the threads of `pool` where it is given."""
    blocks = rows.reshape(-1, kind.size)
    out = out.reshape(-1, kind.elements)
    kernel = KERNELS.get(kind.name) or _packaged(kind.name)
    step = max(1, PIECE // kind.elements)

    def piece(start: int) -> None:
        kernel(blocks[start : start + step], out[start : start + step])

    starts = range(0, len(blocks), step)
    for _ in map(piece, starts) if pool is None or len(starts) == 1 else pool.map(piece, starts):
        pass


def _scale(blocks: Bytes, at: int) -> Floats:
    """The float16 at a byte of each block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[n, 16] to [n, 32]: the lower halves of the bytes, then the upper ones. Works on eight bytes at a time."""
    words = np.ascontiguousarray(packed).view(np.uint64)
    out = np.empty((len(packed), 4), np.uint64)
    np.bitwise_and(words, LOW_HALVES, out=out[:, :2])
    words >>= np.uint64(4)
    np.bitwise_and(words, LOW_HALVES, out=out[:, 2:])
    return out.view(np.uint8)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    out[:] = _nibbles(blocks[:, 2:])
    out -= np.float32(8)
    out *= _scale(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    out[:] = _nibbles(blocks[:, 4:])
    out *= _scale(blocks, 0)
    out += _scale(blocks, 2)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _scale(blocks, 0)


KERNELS: dict[str, Kernel] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}


def _packaged(name: str) -> Kernel:
    """The `gguf` package's own: slower, and the package takes a while to import."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kind: Any = GGMLQuantizationType[name]

    def kernel(blocks: Bytes, out: Floats) -> None:
        out[:] = dequantize(blocks, kind)

    return kernel
