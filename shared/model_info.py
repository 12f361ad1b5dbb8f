"""What every process needs to know of the served model, read from its files without loading it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from shared.config import EngineConfig
from shared.errors import StartupError
from shared.model_config import ModelConfig, is_gguf, read_config, read_json
from shared.safetensors_file import read_header, weight_files
from shared.tokenizer_size import tokenizer_size

DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "float64": "float32"}
SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float32"}


class ModelInfo(msgspec.Struct, kw_only=True):
    """Facts read from a model's files by the scheduler and sent to all in `Welcome`.

    `path` is a local folder or GGUF file (on the scheduler's host; a peer without it resolves `EngineConfig.model`).
    """

    path: str
    architecture: str  # e.g. "LlamaForCausalLM"
    vocab_size: int  # rows of the embedding
    max_model_len: int  # tokens, prompt and output together, after --max-model-len
    eos_token_ids: list[int]
    dtype: str  # resolved: "float32", "bfloat16" or "float16"
    tokenizer_size: int = 0  # ids below it have text and may be sampled; the rest of the vocabulary is padding
    created: int = 0  # unix time

    def __post_init__(self) -> None:
        if not 0 < self.tokenizer_size < self.vocab_size:
            self.tokenizer_size = self.vocab_size


def read_model_info(config: EngineConfig) -> ModelInfo:
    """Finds the model's files, checks that it can be served and reads the facts. Raises StartupError."""
    from shared.hub import resolve  # imports the hub's client only where a model is looked up

    path = resolve(config.model, config.revision)
    model = read_config(path)
    if model.values.get("quantization_config"):
        raise model.error("quantization_config", "is given: checkpoints quantised in that way are not supported")
    if config.quantization == "gguf" and not is_gguf(path):
        raise StartupError(f"--quantization gguf: {path} is not a GGUF file; choose int8, int4 or w8a8")
    return ModelInfo(
        path=str(path),
        architecture=model.architecture,
        vocab_size=model.integer("vocab_size"),
        max_model_len=max_model_len(model, config.max_model_len),
        eos_token_ids=eos_token_ids(path, model),
        dtype=config.dtype if config.dtype != "auto" else checkpoint_dtype(path, model),
        tokenizer_size=model.integer("tokenizer_size", 0, 0) if is_gguf(path) else tokenizer_size(path),
        created=int(path.stat().st_mtime),
    )


def max_model_len(model: ModelConfig, asked: int | None) -> int:
    """Tokens of the longest context: `asked`, or the model's own. Raises StartupError for more than that."""
    limit = model.max_position
    if asked is None:
        return model.default_length
    if not 1 <= asked <= limit:
        raise StartupError(f"--max-model-len {asked}: this model takes from 1 to {limit} tokens")
    return asked


def checkpoint_dtype(path: Path, model: ModelConfig) -> str:
    """What `--dtype auto` means: the checkpoint's own type, and bfloat16 for a GGUF file."""
    if is_gguf(path):
        return "bfloat16"
    named = model.values.get("dtype") or model.values.get("torch_dtype")
    if named is None:
        return _stored_dtype(path)
    dtype = DTYPES.get(str(named).removeprefix("torch."))
    if dtype is None:
        raise model.error("dtype", f"is {named!r}, which is not supported; choose one with --dtype")
    return dtype


def _stored_dtype(path: Path) -> str:
    """The commonest dtype in the first weight file."""
    kinds = Counter(SAFETENSORS_DTYPES.get(entry.dtype) for entry in read_header(weight_files(path)[0]).values())
    return next((kind for kind, _ in kinds.most_common() if kind), "float32")


def eos_token_ids(path: Path, model: ModelConfig) -> list[int]:
    """The ids that end a sequence: all that config.json, generation_config.json and tokenizer_config.json name.

    A GGUF file, which has none of these beside it, names all of its own in its configuration.
    """
    ids = _token_ids(model, "eos_token_id")
    generation = _optional(path / "generation_config.json")
    if generation is not None:
        ids |= _token_ids(generation, "eos_token_id")
    tokenizer = _optional(path / "tokenizer_config.json")
    if tokenizer is not None:
        token = tokenizer.values.get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            ids |= _lookup(path, tokenizer, text)
    return sorted(ids)


def _optional(path: Path) -> ModelConfig | None:
    return ModelConfig(read_json(path), str(path)) if path.exists() else None


def _token_ids(config: ModelConfig, key: str) -> set[int]:
    value = config.values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(id, int) and not isinstance(id, bool) and id >= 0 for id in ids):
        raise config.error(key, f"must be a token id or a list of them, got {value!r}")
    return set(ids)


def _lookup(path: Path, tokenizer: ModelConfig, text: str) -> set[int]:
    """The id of a special token, out of tokenizer.json or the older table in tokenizer_config.json."""
    table = tokenizer.table("added_tokens_decoder")
    added: list[tuple[Any, Any]] = list(table.values.items()) if table else []
    full = _optional(path / "tokenizer.json")
    listed = full.values.get("added_tokens") if full else None
    added += [(entry.get("id"), entry) for entry in listed or [] if isinstance(entry, dict)]
    return {int(id) for id, entry in added if isinstance(entry, dict) and entry.get("content") == text}
