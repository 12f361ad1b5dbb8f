"""A loaded tokenizer, whatever it came from: text to ids, ids to text, chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.tokenizer.decoder import Decoder, WindowDecoder, decoder_of


class Encoder(Protocol):
    """Text to ids. Called from one thread at a time."""

    def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """The ids of each text."""
        ...

    def strings(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's spelling of each id; "" where it has none."""
        ...


class FastEncoder:
    """Encodes with a `tokenizers.Tokenizer`, outside the interpreter's lock."""

    def __init__(self, tokenizer: Any) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer

    def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in found]

    def strings(self, ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.id_to_token(i) or "" for i in ids]


class SlowEncoder:
    """Encodes with a tokenizer written in Python, as transformers loads it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        return [list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens)) for text in texts]

    def strings(self, ids: Sequence[int]) -> list[str]:
        return [token or "" for token in self._tokenizer.convert_ids_to_tokens(list(ids))]


@dataclass(frozen=True)
class Codec:
    """All that the service needs of a tokenizer."""

    encoder: Encoder
    decoder: Decoder
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # "bos_token": "<s>" ...
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # "default", and others by name


def fast_codec(
    tokenizer: Any, special_tokens: Mapping[str, str], chat_templates: Mapping[str, str], vocab_size: int = 0
) -> Codec:
    """A codec over a `tokenizers.Tokenizer`, for a model of at least `vocab_size` ids."""
    return Codec(FastEncoder(tokenizer), decoder_of(tokenizer, vocab_size), special_tokens, chat_templates)


def slow_codec(
    tokenizer: Any, special_tokens: Mapping[str, str], chat_templates: Mapping[str, str], vocab_size: int = 0
) -> Codec:
    """A codec over a Python tokenizer of transformers, for a model of at least `vocab_size` ids."""

    size = len(tokenizer)

    def decode(ids: list[int]) -> str:
        known = [i for i in ids if i < size]
        return str(tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    decoder = WindowDecoder(decode, tokenizer.all_special_ids, max(size, vocab_size))
    return Codec(SlowEncoder(tokenizer), decoder, special_tokens, chat_templates)
