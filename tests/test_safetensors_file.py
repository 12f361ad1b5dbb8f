"""Headers of safetensors files, and which files belong to a model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shared.errors import StartupError
from shared.safetensors_file import read_header, weight_files


def raw(header: Any, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    def filled(shape: tuple[int, ...], dtype: torch.dtype, byte: str) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        tensor.reshape(-1).view(torch.uint8).fill_(ord(byte))
        return tensor

    tensors = {
        "a": filled((3, 4), torch.float32, "a"),
        "b": filled((5,), torch.bfloat16, "b"),
        "c": filled((), torch.float32, "c"),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "x.safetensors")
    assert {name: (entry.dtype, entry.shape, entry.size) for name, entry in found.items()} == {
        "a": ("F32", (3, 4), 48),
        "b": ("BF16", (5,), 10),
        "c": ("F32", (), 4),
    }
    data = (tmp_path / "x.safetensors").read_bytes()
    for name, entry in found.items():
        assert set(data[entry.offset : entry.offset + entry.size]) == {ord(name)}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 3) + b"{}",
        struct.pack("<Q", 2) + b"{]",
        raw([1]),
        raw({"a": 1}),
        raw({"a": {"dtype": "F32", "shape": [1]}}),
        raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"123"),
        raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, b"1234"),
        raw({"a": {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]}}, b"1234"),
        raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
        raw({"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
    ],
)
def test_damage_is_one_clear_error(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(StartupError, match=r"x\.safetensors: corrupt or truncated"):
        read_header(tmp_path / "x.safetensors")


def test_the_files_of_a_model(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no \.safetensors files"):
        weight_files(tmp_path)
    parts = [tmp_path / "b.safetensors", tmp_path / "a.safetensors"]
    for part in parts:
        part.touch()
    assert weight_files(tmp_path) == sorted(parts)
    (tmp_path / "model.safetensors").touch()
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "b.safetensors"}}))
    assert weight_files(tmp_path) == [tmp_path / "b.safetensors"]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"x": "model-2.safetensors"}}, "model-2.safetensors: missing"),
        ({"weight_map": {"x": "../other.safetensors"}}, "is not a file name"),
        ({"weight_map": {"x": "/etc/passwd"}}, "is not a file name"),
        ({"weight_map": []}, "not a safetensors index"),
        ({}, "not a safetensors index"),
        ([], "not a safetensors index"),
    ],
)
def test_a_bad_index_is_one_clear_error(index: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StartupError, match=message):
        weight_files(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"gone\.safetensors: missing"):
        read_header(tmp_path / "gone.safetensors")
