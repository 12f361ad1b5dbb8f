"""GGUF files: metadata and tensor directory, read in milliseconds and checked against the file's bounds.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import StartupError

MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_NESTING = 4  # arrays in arrays; nobody writes more than one
DEFAULT_ALIGNMENT = 32

STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # struct codes


@dataclass(frozen=True)
class GGMLType:
    """How a tensor's elements are stored: blocks of `elements` elements in `size` bytes."""

    name: str
    elements: int
    size: int


GGML_TYPES: dict[int, GGMLType] = {
    number: GGMLType(name, elements, size)
    for number, name, elements, size in [
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
    ]
}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in the file. `shape` is in torch's order: rows first, contiguous elements last."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int  # bytes, from the start of the file
    size: int  # bytes


class GGUFFile:
    """An open GGUF file. Raises StartupError, naming the file, when it is truncated, corrupt or of an unknown kind.

    Arrays are decoded when asked for: a vocabulary costs nothing to those who do not want it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise StartupError(f"{path}: cannot be read: {error}") from None
        try:
            cursor = _Cursor(self._map)
            metadata, self.tensors = self._read(cursor)
        except (_CorruptError, struct.error, OverflowError) as error:
            self.close()
            raise StartupError(f"{path}: corrupt or truncated GGUF file: {error}") from None
        except StartupError:
            self.close()
            raise
        self.metadata: Mapping[str, Any] = _Metadata(metadata)

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps the file, or lets it be unmapped with the last view handed out by `data`."""
        with suppress(BufferError):
            self._map.close()

    def data(self, tensor: TensorInfo) -> memoryview:
        """The tensor's bytes, in the mapping, not copied."""
        return memoryview(self._map)[tensor.offset : tensor.offset + tensor.size]

    def floats(self, name: str) -> list[float] | None:
        """The values of a small F32 tensor, or None if the file has none of that name."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if tensor.type.name != "F32":
            raise StartupError(f"{self.path}: {name} should be F32, not {tensor.type.name}")
        return list(struct.unpack(f"<{tensor.size // 4}f", self.data(tensor)))

    def _read(self, cursor: _Cursor) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if cursor.take(4) != b"GGUF":
            raise StartupError(f"{self.path}: not a GGUF file (its first bytes are not 'GGUF')")
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise StartupError(f"{self.path}: GGUF version {version} is not supported, only 2 and 3, little-endian")
        tensor_count, key_count = cursor.scalar("Q"), cursor.scalar("Q")
        metadata = {}
        for _ in range(key_count):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalar("I"))
        headers = [self._tensor_header(cursor) for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise _CorruptError(f"general.alignment is {alignment}, not a power of two")
        start = (cursor.offset + alignment - 1) // alignment * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in headers:
            size = math.prod(shape) // kind.elements * kind.size
            if name in tensors:
                raise _CorruptError(f"tensor {name} occurs twice")
            if offset % alignment or start + offset + size > len(self._map):
                raise _CorruptError(f"tensor {name} lies outside the file")
            tensors[name] = TensorInfo(name, shape, kind, start + offset, size)
        return metadata, tensors

    def _tensor_header(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLType, int]:
        name = cursor.string()
        dims = cursor.scalar("I")
        if not 1 <= dims <= MAX_DIMS:
            raise _CorruptError(f"tensor {name} has {dims} dimensions")
        shape = tuple(reversed([cursor.scalar("Q") for _ in range(dims)]))
        number, offset = cursor.scalar("I"), cursor.scalar("Q")
        kind = GGML_TYPES.get(number)
        if kind is None:
            known = ", ".join(kind.name for kind in GGML_TYPES.values())
            raise StartupError(f"{self.path}: tensor {name} is of ggml type {number}, which is none of {known}")
        if shape[-1] % kind.elements:
            raise _CorruptError(f"tensor {name} has rows of {shape[-1]} elements, not a multiple of {kind.elements}")
        return name, shape, kind, offset


class _CorruptError(Exception):
    pass


class _Cursor:
    """Reads values one after the other; anything past the end is a `_CorruptError` or struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = 0

    def take(self, size: int) -> bytes:
        self.skip(size)
        return self.data[self.offset - size : self.offset]

    def skip(self, size: int) -> None:
        if size > len(self.data) - self.offset:
            raise _CorruptError("it ends in the middle of a value")
        self.offset += size

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.offset)
        self.offset += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", "surrogateescape")

    def value(self, kind: int, depth: int = 0) -> Any:
        """A value, or for an array a function that decodes it."""
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.scalar(self._code(kind))
        if depth == MAX_NESTING:
            raise _CorruptError("arrays are nested too deeply")
        element, count = self.scalar("I"), self.scalar("Q")
        start = self.offset
        if element == STRING:
            self._skip_strings(count)
            return lambda: list(_strings(self.data, start, count))
        if element == ARRAY:
            rows = [self.value(ARRAY, depth + 1) for _ in range(count)]
            return lambda: [row() for row in rows]
        code = self._code(element)
        self.skip(count * struct.calcsize("<" + code))
        return lambda: list(struct.unpack_from(f"<{count}{code}", self.data, start))

    def _skip_strings(self, count: int) -> None:
        data, offset, end = self.data, self.offset, len(self.data)
        length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            offset += 8 + length(data, offset)[0]
        if offset > end:
            raise _CorruptError("it ends in the middle of a string array")
        self.offset = offset

    @staticmethod
    def _code(kind: int) -> str:
        try:
            return SCALARS[kind]
        except KeyError:
            raise _CorruptError(f"unknown value type {kind}") from None


def _strings(data: mmap.mmap, offset: int, count: int) -> Iterator[str]:
    for _ in range(count):
        (size,) = struct.unpack_from("<Q", data, offset)
        yield data[offset + 8 : offset + 8 + size].decode("utf-8", "surrogateescape")
        offset += 8 + size


class _Metadata(Mapping[str, Any]):
    """The metadata; an array is decoded at its first use."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if callable(value):
            value = self._values[key] = value()
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
