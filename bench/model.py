"""A model as a benchmark sees it: which bytes a token costs, read from the headers of its files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from services.worker.models import decoder_spec
from shared.config import EngineConfig
from shared.gguf_file import GGUFFile
from shared.model_config import read_config
from shared.model_info import read_model_info
from shared.safetensors_file import read_header, weight_files

HEADS = ("output.weight", "lm_head.weight")
EMBEDDINGS = ("token_embd.weight", "model.embed_tokens.weight")


@dataclass(frozen=True)
class Model:
    """Sizes in bytes. `token_bytes` are the weights that one token reads: all but an embedding that is no head."""

    path: Path
    name: str
    dtype: str
    vocab_size: int
    weight_bytes: int
    token_bytes: int
    kv_token_bytes: int  # in 16 bits


def read_model(path: str) -> Model:
    """Reads the headers of a folder or GGUF file; without one, of the bundled model. Raises StartupError."""
    info = read_model_info(EngineConfig(model=path))
    found = Path(info.path).absolute()
    spec = decoder_spec(read_config(found), info.max_model_len)
    sizes = _gguf_sizes(found) if found.is_file() else _folder_sizes(found)
    embedding = sum(sizes.get(name, 0) for name in EMBEDDINGS)
    own_head = any(name in sizes for name in HEADS) and not spec.tie_embeddings
    total = sum(sizes.values()) - (sum(sizes.get(name, 0) for name in HEADS) if spec.tie_embeddings else 0)
    kv = 2 * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    name = found.stem if found.is_file() else found.name
    dtype = _gguf_type(found) if found.is_file() else info.dtype
    return Model(found, name, dtype, info.vocab_size, total, total - (embedding if own_head else 0), kv)


def _folder_sizes(folder: Path) -> dict[str, int]:
    return {name: entry.size for file in weight_files(folder) for name, entry in read_header(file).items()}


def _gguf_sizes(path: Path) -> dict[str, int]:
    with GGUFFile(path) as file:
        return {name: tensor.size for name, tensor in file.tensors.items()}


def _gguf_type(path: Path) -> str:
    """The type of most of the weights."""
    counts: dict[str, int] = {}
    with GGUFFile(path) as file:
        for tensor in file.tensors.values():
            counts[tensor.type.name] = counts.get(tensor.type.name, 0) + math.prod(tensor.shape)
    most = max(counts, key=lambda name: counts[name])
    return {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}.get(most, most)
