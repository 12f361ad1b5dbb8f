"""The GGUF reader against files written by the gguf package, and against damage."""

from __future__ import annotations

import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.errors import StartupError
from shared.gguf_file import GGML_TYPES, GGUFFile
from tests.model_factory import smollm2

VALUES: dict[str, Any] = {
    "x.uint8": 200,
    "x.int8": -100,
    "x.uint16": 65000,
    "x.int16": -32000,
    "x.uint32": 4_000_000_000,
    "x.int32": -2_000_000_000,
    "x.uint64": 1 << 63,
    "x.int64": -(1 << 62),
    "x.float32": 0.5,
    "x.float64": 1e-300,
    "x.bool": True,
    "x.string": "naïve 🌶",
}
WORDS = ["", "a", "🌶", "four"]


def write(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in VALUES.items():
        getattr(writer, f"add_{key[2:]}")(key, value)
    writer.add_array("x.words", WORDS)
    writer.add_array("x.numbers", [3, 1, 4])
    writer.add_tensor("odd", np.arange(15, dtype=np.float32).reshape(5, 3))
    rows = np.arange(128, dtype=np.float32).reshape(2, 64)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("quantised", gguf.quants.quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "small.gguf")


def test_metadata_of_every_type(small: Path) -> None:
    with GGUFFile(small) as file:
        for key, value in VALUES.items():
            assert file.metadata[key] == value
        assert file.metadata["x.words"] == WORDS
        assert file.metadata["x.words"] == WORDS  # the second time from memory
        assert file.metadata["x.numbers"] == [3, 1, 4]
        assert "nothing" not in file.metadata
        assert set(file.metadata) == {"general.architecture", *VALUES, "x.words", "x.numbers"}


def test_tensors_lie_where_the_gguf_package_finds_them(small: Path) -> None:
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(small).tensors}
    with GGUFFile(small) as file:
        assert file.tensors.keys() == theirs.keys()
        for name, tensor in file.tensors.items():
            assert tensor.shape == tuple(reversed(theirs[name].shape.tolist()))
            assert tensor.type.name == theirs[name].tensor_type.name
            assert tensor.offset == theirs[name].data_offset
            assert bytes(file.data(tensor)) == theirs[name].data.tobytes()
        assert file.floats("odd") == list(range(15))
        assert file.floats("nothing") is None
        with pytest.raises(StartupError, match="quantised should be F32, not Q8_0"):
            file.floats("quantised")


def test_the_type_table_is_ggmls() -> None:
    for number, kind in GGML_TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert theirs.name == kind.name
        assert gguf.GGML_QUANT_SIZES[theirs] == (kind.elements, kind.size)


def test_the_bundled_model_opens_in_a_moment() -> None:
    seconds = []
    for _ in range(3):
        began = time.process_time()
        with GGUFFile(smollm2()) as file:
            seconds.append(time.process_time() - began)
            assert len(file.tensors) == 272
            assert file.tensors["token_embd.weight"].shape == (49152, 576)
            assert file.metadata["llama.context_length"] == 8192
            assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
            assert file.metadata["tokenizer.ggml.tokens"][2] == "<|im_end|>"
    assert min(seconds) < 0.3


def test_every_truncation_is_one_clear_error(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, len(data) - 64, 7), len(data) - 64]:
        cut.write_bytes(data[:length])
        with pytest.raises(StartupError, match=r"cut\.gguf: "):
            GGUFFile(cut)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=8))
def test_damage_is_read_or_refused(small: Path, tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    data = bytearray(small.read_bytes())
    for position, value in changes:
        data[position % len(data)] = value
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data)
    with suppress(StartupError), GGUFFile(damaged) as file:
        for key in file.metadata:
            file.metadata[key]
        for tensor in file.tensors.values():
            assert len(file.data(tensor)) == tensor.size


def header(version: int = 3, tensors: int = 0, keys: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def tensor(name: bytes, dims: list[int], kind: int, offset: int) -> bytes:
    return (
        struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        + struct.pack("<IQ", kind, offset)
    )  # fmt: skip


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


NESTED = struct.pack("<IQ", 9, 1) * 8 + struct.pack("<IQ", 4, 0)

BAD = {
    "not a GGUF file": b"PK\x03\x04" + bytes(64),
    "GGUF version 1 ": header(version=1, rest=bytes(64)),
    "GGUF version 50331648 ": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "ggml type 99": header(tensors=1, rest=tensor(b"t", [32], 99, 0) + bytes(64)),
    "has 9 dimensions": header(tensors=1, rest=tensor(b"t", [1] * 9, 0, 0) + bytes(64)),
    "rows of 33 elements": header(tensors=1, rest=tensor(b"t", [33], 2, 0) + bytes(64)),
    "tensor t lies outside": header(tensors=1, rest=tensor(b"t", [1 << 40], 0, 0) + bytes(64)),
    "tensor u lies outside": header(tensors=1, rest=tensor(b"u", [1], 0, 3) + bytes(64)),
    "occurs twice": header(tensors=2, rest=tensor(b"t", [1], 0, 0) * 2 + bytes(64)),
    "not a power of two": header(keys=1, rest=pair(b"general.alignment", 4, struct.pack("<I", 24)) + bytes(64)),
    "unknown value type 77": header(keys=1, rest=pair(b"k", 77, bytes(64))),
    "nested too deeply": header(keys=1, rest=pair(b"k", 9, NESTED)),
    "middle of a value": header(keys=1, rest=pair(b"k", 9, struct.pack("<IQ", 10, 1 << 60) + bytes(64))),
    "middle of a string array": header(keys=1, rest=pair(b"k", 9, struct.pack("<IQQ", 8, 1, 1 << 60))),
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_wrong_is_said(message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(BAD[message])
    with pytest.raises(StartupError, match=message) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)


def test_nested_arrays(tmp_path: Path) -> None:
    rows = struct.pack("<IQ", 9, 2) + struct.pack("<IQII", 4, 2, 1, 2) + struct.pack("<IQI", 4, 1, 3)
    path = tmp_path / "nested.gguf"
    path.write_bytes(header(keys=1, rest=pair(b"k", 9, rows)))
    with GGUFFile(path) as file:
        assert file.metadata["k"] == [[1, 2], [3]]


def test_a_view_outlives_the_file(small: Path) -> None:
    with GGUFFile(small) as file:
        view = file.data(file.tensors["odd"])
    assert struct.unpack("<15f", view) == tuple(range(15))


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"none\.gguf: cannot be read"):
        GGUFFile(tmp_path / "none.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(StartupError, match=r"empty\.gguf: cannot be read"):
        GGUFFile(tmp_path / "empty.gguf")
