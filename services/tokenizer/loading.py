"""Loads the tokenizer of a model: a Hugging Face folder as transformers does it, a GGUF file from its metadata."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.tokenizer.codec import Codec, fast_codec, slow_codec
from services.tokenizer.gguf_tokenizer import build
from services.tokenizer.plain_folder import read_plain_folder
from shared.errors import StartupError
from shared.gguf_file import GGUFFile

TOKENIZER_FILES = ("token*", "vocab*", "*.model", "tekken*")


def load(path: Path, vocab_size: int = 0) -> Codec:
    """The tokenizer of the model at `path`. Raises StartupError. Reads local files only and runs no code from them.

    `vocab_size`: the model's, which may be larger than the tokenizer's; the ids between have no text.
    """
    if path.is_dir():
        return _from_folder(path, vocab_size)
    with GGUFFile(path) as file:
        built = build(file.metadata)
    return fast_codec(built.tokenizer, built.special_tokens, built.chat_templates, vocab_size)


def avoid_torch() -> None:
    """Keeps transformers from importing torch in this process: tokenizers need none, and it takes seconds."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # or it warns that models are not available


def _from_folder(path: Path, vocab_size: int) -> Codec:
    if not any(next(path.glob(pattern), None) for pattern in TOKENIZER_FILES):
        raise StartupError(f"{path}: holds no tokenizer (tokenizer.json, tokenizer_config.json, tokenizer.model ...)")
    plain = read_plain_folder(path)
    if plain is not None:
        return fast_codec(plain.tokenizer, plain.special_tokens, plain.chat_templates, vocab_size)
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its files provoke
        reason = " ".join(str(error).split())[:300]
        raise StartupError(f"{path}: its tokenizer cannot be loaded: {reason or type(error).__name__}") from None
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    templates = _templates(tokenizer.chat_template)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return slow_codec(tokenizer, special, templates, vocab_size)
    return fast_codec(backend, special, templates, vocab_size)


def _templates(found: str | Mapping[str, str] | None) -> dict[str, str]:
    if found is None:
        return {}
    return {"default": found} if isinstance(found, str) else dict(found)
