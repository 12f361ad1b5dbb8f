"""Dequantised tensors equal the `gguf` package's reading of the same bytes, in pieces and in threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest

from services.worker import dequant
from services.worker.dequant import dequantise
from shared.gguf_file import GGML_TYPES, GGMLType

KINDS = {kind.name: kind for kind in GGML_TYPES.values()}
OWN = sorted(dequant.KERNELS)
PACKAGED = ["Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]


def random_rows(kind: GGMLType, rows: int, blocks: int, largest: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, largest, (rows, blocks * kind.size), dtype=np.uint8, endpoint=True)


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("name", [*OWN, *PACKAGED])
def test_equals_the_package(name: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS[name]
    monkeypatch.setattr(dequant, "PIECE", 4 * kind.elements)
    stored = random_rows(kind, 5, 3, 64)  # small bytes: no infinite scales
    expected = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[name])
    found = np.empty((5, 3 * kind.elements), np.float32)
    with ThreadPoolExecutor(max(1, threads)) as pool:
        dequantise(stored, kind, found, pool if threads else None)
    assert np.array_equal(found, expected)
    assert np.abs(found).max() > 0


@pytest.mark.parametrize("name", OWN)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_any_bytes_at_all(name: str) -> None:
    kind = KINDS[name]
    stored = random_rows(kind, 16, 512, 255)
    expected = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[name])
    found = np.empty_like(expected)
    dequantise(stored, kind, found)
    np.testing.assert_array_equal(found, expected)


def test_an_error_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(blocks: np.ndarray, out: np.ndarray) -> None:
        raise MemoryError

    monkeypatch.setitem(dequant.KERNELS, "Q8_0", broken)
    monkeypatch.setattr(dequant, "PIECE", 32)
    with ThreadPoolExecutor(2) as pool, pytest.raises(MemoryError):
        dequantise(random_rows(KINDS["Q8_0"], 4, 4, 64), KINDS["Q8_0"], np.empty((4, 128), np.float32), pool)
