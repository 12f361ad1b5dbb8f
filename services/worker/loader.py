"""Weights from safetensors and GGUF files, one tensor at a time, under the canonical names of `DecoderSpec`.

Strict: everything that can be wrong with names and shapes is found in the headers, before any weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.worker.dequant import dequantise
from services.worker.executor import Floats, Weight
from services.worker.models.names import GGUF_HARMLESS, GGUF_NAMES, HF_HARMLESS, HF_NAMES, checkpoint_names
from services.worker.quantize import PANEL, Format, Formats, formats, panel_bytes
from services.worker.spec import DecoderSpec
from shared.errors import StartupError
from shared.gguf_file import GGMLType, GGUFFile, TensorInfo
from shared.model_config import is_gguf
from shared.safetensors_file import Entry, read_header, weight_files

Weights = Iterator[tuple[str, Weight]]

FLOAT_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
GGUF_FLOATS: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
SAFETENSORS_FLOATS: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
BUFFER = 1 << 20  # elements dequantised at once, in one place, whose pages are there already
NAMED = 3  # tensors named in an error; the others are counted


def weights(path: Path, spec: DecoderSpec, threads: int = 1) -> Weights:
    """Canonical name and values of each weight in `spec.weight_shapes()`.

    Values stored as floats are views of the mapped file, read-only; what is stored in blocks comes as `Stored`, is
    dequantised with `threads` threads when asked, and counts until the next weight is asked for. Raises StartupError
    at once for a missing, left-over or wrongly shaped tensor, which it names.
    """
    if is_gguf(path):
        file = GGUFFile(path)
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        names = _match(path, shapes, spec, GGUF_NAMES, GGUF_HARMLESS)
        return _gguf_weights(file, names, spec, threads)
    files = weight_files(path)
    entries = _entries(files)
    shapes = {name: entry.shape for name, (_, entry) in entries.items()}
    names = _match(path, shapes, spec, HF_NAMES, HF_HARMLESS)
    for name in names:
        if entries[name][1].dtype not in SAFETENSORS_FLOATS:
            raise StartupError(f"{entries[name][0]}: {name} is of type {entries[name][1].dtype}, not a float type")
    return _safetensors_weights(entries, names, spec.tie_embeddings)


def weight_formats(path: Path, spec: DecoderSpec, quantization: str) -> dict[str, Format]:
    """Which weights of a model are quantised under `--quantization`, and how. Reads headers only."""
    if quantization != "gguf":
        return formats(spec, quantization)
    with GGUFFile(path) as file:
        names = checkpoint_names(spec.weight_shapes(), GGUF_NAMES)
        kinds = {canonical: file.tensors[name].type.name for name, canonical in names.items() if name in file.tensors}
    return formats(spec, quantization, kinds)


def weight_bytes(spec: DecoderSpec, dtype: str, quantised: Formats | None = None) -> int:
    """Bytes of the model's weights, held as `dtype` or quantised."""
    quantised, total = quantised or {}, 0
    for name, shape in spec.weight_shapes().items():
        if name in quantised:
            total += -(-shape[0] // PANEL) * panel_bytes(shape[1], quantised[name])
        else:
            total += math.prod(shape) * FLOAT_SIZES[dtype]
    return total


def _entries(files: list[Path]) -> dict[str, tuple[Path, Entry]]:
    """Every tensor of a set of safetensors files with the file that holds it."""
    entries: dict[str, tuple[Path, Entry]] = {}
    for file in files:
        for name, entry in read_header(file).items():
            if name in entries:
                raise StartupError(f"{file}: tensor {name} is also in {entries[name][0].name}")
            entries[name] = (file, entry)
    return entries


def _match(
    path: Path,
    found: Mapping[str, tuple[int, ...]],
    spec: DecoderSpec,
    table: dict[str, str],
    harmless: tuple[str, ...],
) -> dict[str, str]:
    """The canonical name of each tensor to load. Raises StartupError unless `found` is exactly what `spec` needs."""
    shapes = spec.weight_shapes()
    names = checkpoint_names(shapes, table)
    head = f"{table['lm_head']}.weight"
    missing = [name for name in names if name not in found]
    if missing:
        raise StartupError(f"{path}: lacks {_listed(missing)} of a {spec.architecture} of {spec.num_layers} layers")
    extra = [name for name in found if name not in names and not name.endswith(harmless) and name != head]
    if extra:
        raise StartupError(
            f"{path}: has {_listed(extra)}, unknown to a {spec.architecture} of {spec.num_layers} layers"
        )
    for name, canonical in names.items():
        if found[name] != shapes[canonical]:
            raise StartupError(f"{path}: {name} has shape {list(found[name])}, should be {list(shapes[canonical])}")
    if head in found and spec.tie_embeddings and found[head] != shapes["embed.weight"]:
        raise StartupError(f"{path}: {head} has shape {list(found[head])}, should be {list(shapes['embed.weight'])}")
    return names


def _listed(names: list[str]) -> str:
    more = len(names) - NAMED
    return f"{len(names)} tensors, {', '.join(names[:NAMED])}{f' and {more} more' if more > 0 else ''}"


def _safetensors_weights(entries: Mapping[str, tuple[Path, Entry]], names: Mapping[str, str], tied: bool) -> Weights:
    maps = {file: _mapped(file) for file, _ in entries.values()}
    head, embed = f"{HF_NAMES['lm_head']}.weight", f"{HF_NAMES['embed']}.weight"
    if tied and head in entries:
        _check_tied(entries, maps, head, embed)
    in_file_order = sorted(names, key=lambda name: (entries[name][0], entries[name][1].offset))
    for name in in_file_order:
        file, entry = entries[name]
        yield names[name], _values(maps[file], entry)


def _mapped(file: Path) -> NDArray[np.uint8]:
    try:
        return np.memmap(file, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise StartupError(f"{file}: cannot be read: {error}") from None


def _values(data: NDArray[np.uint8], entry: Entry) -> NDArray[Any]:
    values = data[entry.offset : entry.offset + entry.size].view(SAFETENSORS_FLOATS[entry.dtype]).reshape(entry.shape)
    if values.dtype == np.float64:
        return values.astype(np.float32)
    return np.require(values, requirements="A")  # the format does not promise that offsets are multiples


def _check_tied(
    entries: Mapping[str, tuple[Path, Entry]], maps: Mapping[Path, NDArray[np.uint8]], head: str, embed: str
) -> None:
    one, other = (_values(maps[file], entry) for file, entry in (entries[head], entries[embed]))
    if one.dtype != other.dtype or not np.array_equal(one, other):
        raise StartupError(
            f"{entries[head][0]}: {head} differs from {embed}, though config.json says that they are one"
            " (tie_word_embeddings); set it to false there"
        )


def _gguf_weights(file: GGUFFile, names: Mapping[str, str], spec: DecoderSpec, threads: int) -> Weights:
    permuted = file.metadata["general.architecture"] == "llama"
    heads = {"q": spec.num_heads, "k": spec.num_kv_heads}
    with file, ThreadPoolExecutor(threads, "dequantise") as pool:
        for name, tensor in file.tensors.items():
            canonical = names.get(name)
            if canonical is None:
                continue
            rows = _rows(file, tensor)
            part = canonical.rsplit(".", 2)[-2]
            if permuted and part in heads:
                rows = _unpermuted(rows, heads[part])
            if tensor.type.name in GGUF_FLOATS:
                values = rows.view(GGUF_FLOATS[tensor.type.name]).reshape(tensor.shape)
                yield canonical, np.require(values, requirements="A")
                continue
            yield canonical, StoredRows(tensor.type, rows, tensor.shape, pool)


class StoredRows:
    """Implements `Stored`."""

    def __init__(
        self, kind: GGMLType, rows: NDArray[np.uint8], shape: tuple[int, ...], pool: ThreadPoolExecutor
    ) -> None:
        self.kind = kind.name
        self.rows = rows
        self.shape = shape
        self._type = kind
        self._pool = pool

    def floats(self) -> Floats:
        """All of it, in memory of its own."""
        out = np.empty(self.shape, np.float32)
        dequantise(self.rows, self._type, out, self._pool)
        return out

    def pieces(self) -> Iterator[tuple[int, Floats]]:
        """Some rows at a time, in one place."""
        width = self.shape[-1]
        step = max(1, BUFFER // width)
        buffer = np.empty((min(step, self.shape[0]), width), np.float32)
        for first in range(0, self.shape[0], step):
            rows = self.rows[first : first + step]
            out = buffer[: len(rows)]
            dequantise(rows, self._type, out, self._pool)
            yield first, out


def _rows(file: GGUFFile, tensor: TensorInfo) -> NDArray[np.uint8]:
    """The stored bytes: a row per output of a matrix, per value of a vector."""
    return np.frombuffer(file.data(tensor), np.uint8).reshape(tensor.shape[0], -1)


def _unpermuted(rows: NDArray[np.uint8], heads: int) -> NDArray[np.uint8]:
    """Undoes llama.cpp's row order, which interleaves the two halves of each head for its rotary kernel.

    In the file a head's rows are 0, d/2, 1, d/2 + 1, ...; `DecoderSpec` has them as 0, 1, ..., d/2, d/2 + 1, ...
    """
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
