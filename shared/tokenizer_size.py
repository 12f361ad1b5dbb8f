"""How many ids a model's tokenizer knows: a vocabulary is often padded beyond, for the sake of round matrix sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

GGUF_UNUSED = 5  # the token type of padding (llama.cpp, LLAMA_TOKEN_TYPE_UNUSED)


class _Added(msgspec.Struct):
    id: int


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}  # the list: of a Unigram model, in the order of the ids


class _TokenizerJson(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []


class _TokenizerConfig(msgspec.Struct):
    added_tokens_decoder: dict[int, msgspec.Raw] = {}


def tokenizer_size(folder: Path) -> int:
    """One more than the highest id of the tokenizer in a model's folder; 0 where that cannot be told.

    Damaged files count as absent here: whoever loads the tokenizer says what is wrong with them.
    """
    try:
        return _of_folder(folder)
    except (OSError, ValueError, IndexError):
        return 0


def gguf_tokenizer_size(metadata: Mapping[str, Any]) -> int:
    """The same of a GGUF file, by its metadata. Its converter fills the list of tokens up with unused ones."""
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list):
        tokens = metadata.get("tokenizer.ggml.tokens")
        return len(tokens) if isinstance(tokens, list) else 0
    size = len(kinds)
    while size and kinds[size - 1] == GGUF_UNUSED:
        size -= 1
    return size


def _of_folder(folder: Path) -> int:
    whole, vocab, pieces = folder / "tokenizer.json", folder / "vocab.json", folder / "tokenizer.model"
    if whole.exists():
        tokenizer = msgspec.json.decode(whole.read_bytes(), type=_TokenizerJson)
        size = max(_size_of(tokenizer.model.vocab), _end(token.id for token in tokenizer.added_tokens))
    elif vocab.exists():
        size = _size_of(_table(vocab))
    elif pieces.exists():
        size = sum(field == 1 for field in _fields(pieces.read_bytes()))
    else:
        return 0
    return max(size, _end(_added(folder)))


def _added(folder: Path) -> Iterator[int]:
    """The ids that other files add to the tokenizer's own."""
    table, config = folder / "added_tokens.json", folder / "tokenizer_config.json"
    if table.exists():
        yield from _table(table).values()
    if config.exists():
        yield from msgspec.json.decode(config.read_bytes(), type=_TokenizerConfig).added_tokens_decoder


def _table(path: Path) -> dict[str, int]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, int])


def _size_of(vocab: dict[str, int] | list[tuple[str, float]]) -> int:
    return len(vocab) if isinstance(vocab, list) else _end(vocab.values())


def _end(ids: Iterable[int]) -> int:
    return max(ids, default=-1) + 1


def _fields(data: bytes) -> Iterator[int]:
    """The numbers of a protobuf message's fields, in order; of SentencePiece's ModelProto, the pieces are field 1."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        yield tag >> 3
        match tag & 7:
            case 0:
                _, at = _varint(data, at)
            case 1:
                at += 8
            case 2:
                size, at = _varint(data, at)
                at += size
            case 5:
                at += 4
            case kind:
                raise ValueError(f"protobuf wire type {kind}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        shift += 7
        at += 1
        if byte < 128:
            return value, at
