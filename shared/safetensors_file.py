"""Safetensors files: the header, checked against the file's bounds.

Format: https://huggingface.co/docs/safetensors (an 8-byte length, JSON, then the data).
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import StartupError

FLOAT_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes


@dataclass(frozen=True)
class Entry:
    """A tensor in the file."""

    dtype: str  # as the format spells it: "F32", "BF16", ...
    shape: tuple[int, ...]
    offset: int  # bytes, from the start of the file
    size: int  # bytes


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a .safetensors file by name. Raises StartupError, naming the file, when it is corrupt."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            room = path.stat().st_size - 8 - length
            if room < 0:
                raise ValueError("it ends in the middle of its header")
            header = json.loads(file.read(length))
        return {name: _entry(name, entry, 8 + length, room) for name, entry in header.items() if name != "__metadata__"}
    except FileNotFoundError:
        raise StartupError(f"{path}: missing") from None
    except (OSError, struct.error, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise StartupError(f"{path}: corrupt or truncated safetensors file: {error}") from None


def _entry(name: str, entry: dict[str, Any], start: int, room: int) -> Entry:
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= room:
        raise ValueError(f"tensor {name} lies outside the file")
    dtype, shape, size = str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), end - begin
    if dtype in FLOAT_SIZES and math.prod(shape) * FLOAT_SIZES[dtype] != size:
        raise ValueError(f"tensor {name} has {size} bytes, not those of shape {list(shape)} in {dtype}")
    return Entry(dtype, shape, start + begin, size)


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder's weights: those of the index, else model.safetensors, else all. Raises StartupError."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in _shards(index)]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise StartupError(f"{folder}: no .safetensors files; pickled weights (.bin) are not read, convert them first")
    return files


def _shards(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise StartupError(f"{index}: not a safetensors index: {error!r}") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise StartupError(f"{index}: {name!r} is not a file name")
        if not (index.parent / name).is_file():
            raise StartupError(f"{index.parent / name}: missing; {index.name} lists it")
    return names
