"""Weights from safetensors and GGUF files, one tensor at a time, under the canonical names of `DecoderSpec`.

Strict: everything that can be wrong with names and shapes is found in the headers, before any weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.worker.models.names import GGUF_HARMLESS, GGUF_NAMES, HF_HARMLESS, HF_NAMES, checkpoint_names
from services.worker.spec import DecoderSpec
from shared.errors import StartupError
from shared.gguf_file import GGUFFile, TensorInfo
from shared.model_config import is_gguf
from shared.safetensors_file import Entry, read_header, weight_files

if TYPE_CHECKING:
    import torch

Weights = Iterator[tuple[str, "torch.Tensor"]]

FLOAT_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
GGUF_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
SAFETENSORS_FLOATS = ("F64", "F32", "F16", "BF16")
NAMED = 3  # tensors named in an error; the others are counted
CHUNK = 1 << 22  # elements dequantised at once: the temporaries are several times as large


def weights(path: Path, spec: DecoderSpec) -> Weights:
    """Canonical name and tensor (float32, float16 or bfloat16, in CPU memory) of each weight in `spec.weight_shapes()`.

    Raises StartupError at once for a missing, left-over or wrongly shaped tensor, which it names.
    """
    if is_gguf(path):
        file = GGUFFile(path)
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        names = _match(path, shapes, spec, GGUF_NAMES, GGUF_HARMLESS)
        return _gguf_weights(file, names, spec)
    files = weight_files(path)
    entries = _entries(files)
    shapes = {name: entry.shape for name, (_, entry) in entries.items()}
    names = _match(path, shapes, spec, HF_NAMES, HF_HARMLESS)
    for name in names:
        if entries[name][1].dtype not in SAFETENSORS_FLOATS:
            raise StartupError(f"{entries[name][0]}: {name} is of type {entries[name][1].dtype}, not a float type")
    return _safetensors_weights({name: file for name, (file, _) in entries.items()}, names, spec.tie_embeddings)


def weight_bytes(path: Path, dtype: str | None = None) -> int:
    """Bytes of the checkpoint's tensors held as `dtype`, or as stored; reads headers only. Raises StartupError."""
    if is_gguf(path):
        with GGUFFile(path) as file:
            found = [(math.prod(tensor.shape), tensor.size) for tensor in file.tensors.values()]
    else:
        found = [(math.prod(entry.shape), entry.size) for _, entry in _entries(weight_files(path)).values()]
    return sum(size if dtype is None else elements * FLOAT_SIZES[dtype] for elements, size in found)


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


def _safetensors_weights(files: Mapping[str, Path], names: Mapping[str, str], tied: bool) -> Weights:
    head, embed = f"{HF_NAMES['lm_head']}.weight", f"{HF_NAMES['embed']}.weight"
    if tied and head in files:
        _check_tied(files, head, embed)
    for file in dict.fromkeys(files.values()):
        with _opened(file) as reader:
            for name in reader.keys():  # noqa: SIM118 - not a dict
                if name in names:
                    yield names[name], reader.get_tensor(name)


def _check_tied(files: Mapping[str, Path], head: str, embed: str) -> None:
    import torch

    with _opened(files[head]) as one, _opened(files[embed]) as other:
        if not torch.equal(one.get_tensor(head), other.get_tensor(embed)):
            raise StartupError(
                f"{files[head]}: {head} differs from {embed}, though config.json says that they are one"
                " (tie_word_embeddings); set it to false there"
            )


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as reader:
            yield reader
    except (SafetensorError, OSError) as error:
        raise StartupError(f"{file}: cannot be read: {error}") from None


def _gguf_weights(file: GGUFFile, names: Mapping[str, str], spec: DecoderSpec) -> Weights:
    permuted = file.metadata["general.architecture"] == "llama"
    heads = {"q": spec.num_heads, "k": spec.num_kv_heads}
    with file:
        for name, tensor in file.tensors.items():
            canonical = names.get(name)
            if canonical is None:
                continue
            weight = _stored(file, tensor) if tensor.type.name in GGUF_FLOATS else _dequantised(file, tensor)
            part = canonical.rsplit(".", 2)[-2]
            yield canonical, _unpermuted(weight, heads[part]) if permuted and part in heads else weight


def _stored(file: GGUFFile, tensor: TensorInfo) -> torch.Tensor:
    import numpy as np
    import torch

    weight = torch.empty(tensor.shape, dtype=getattr(torch, GGUF_FLOATS[tensor.type.name]))
    weight.view(torch.uint8).numpy().reshape(-1)[:] = np.frombuffer(file.data(tensor), np.uint8)
    return weight


def _dequantised(file: GGUFFile, tensor: TensorInfo) -> torch.Tensor:
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    columns = tensor.shape[-1]
    stored = np.frombuffer(file.data(tensor), np.uint8).reshape(-1, columns // tensor.type.elements * tensor.type.size)
    weight = torch.empty((len(stored), columns), dtype=torch.float32)
    step = max(1, CHUNK // columns)
    for row in range(0, len(stored), step):
        weight.numpy()[row : row + step] = dequantize(stored[row : row + step], GGMLQuantizationType[tensor.type.name])
    return weight.reshape(tensor.shape)


def _unpermuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes llama.cpp's row order, which interleaves the two halves of each head for its rotary kernel.

    In the file a head's rows are 0, d/2, 1, d/2 + 1, ...; `DecoderSpec` has them as 0, 1, ..., d/2, d/2 + 1, ...
    """
    rest = weight.shape[1:]
    return weight.reshape(heads, -1, 2, *rest).transpose(1, 2).reshape(weight.shape)
