"""Ids to text, a few at a time, without state of its own: what is held back travels with the caller.

Where every token is some bytes, shared/byte_decoder.py decodes, which api processes run too. The state
of a `WindowDecoder` is b"" or `MID_TEXT`, with nothing held and no context, or b"\\1", the number of context ids as one
byte, context ids and held ids packed as int32.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from shared.byte_decoder import ByteDecoder, UnknownIdError, unknown_id
from shared.messages import MID_TEXT, DecodedItem, DecodeItem, pack_ids, unpack_ids

REPLACEMENT = "\ufffd"
CONTEXT_IDS = 4  # ids of the text before that a window keeps, if they have text
MAX_CONTEXT_IDS = 64
HELD_IDS = 16  # ids a window holds back at most


class Decoder(Protocol):
    """Decodes one item. Raises UnknownIdError, and ValueError for a state that is none of its own."""

    def decode(self, item: DecodeItem) -> DecodedItem:
        """The new text and the new state."""
        ...


class WindowDecoder:
    """For any other tokenizer: decodes the new ids together with a few before them, and takes what is added.

    Text ending in U+FFFD is held back as it may be half a character, for `HELD_IDS` ids at most.
    """

    def __init__(self, decode: Callable[[list[int]], str], special: Iterable[int], vocab_size: int) -> None:
        """`decode`: the text of ids, special ones too; `special`: ids to skip on demand."""
        self._decode = decode
        self._special = frozenset(special)
        self._vocab_size = vocab_size

    def decode(self, item: DecodeItem) -> DecodedItem:
        if item.ids and not 0 <= min(item.ids) <= max(item.ids) < self._vocab_size:
            raise UnknownIdError(unknown_id(item.ids, self._vocab_size))
        context, held = _unpack_window(item.state)
        held = held + [i for i in item.ids if not (item.skip_special_tokens and i in self._special)]
        if not held:
            return DecodedItem("", item.state)
        before = self._decode(context) if context else ""
        text = self._decode(context + held)
        if text.endswith(REPLACEMENT) and not item.final and len(held) < HELD_IDS:
            return DecodedItem("", _pack_window(context, held))
        return DecodedItem(text[len(before) :], _pack_window(self._shorten(context + held, text), []))

    def _shorten(self, ids: list[int], text: str) -> list[int]:
        """The last few ids, as many as give the end of the text by themselves."""
        count = CONTEXT_IDS
        while count < min(len(ids), MAX_CONTEXT_IDS):
            tail = self._decode(ids[-count:])
            if tail.strip() and REPLACEMENT not in tail and text.endswith(tail.lstrip()):
                return ids[-count:]
            count *= 2
        return ids[-MAX_CONTEXT_IDS:]


def _unpack_window(state: bytes) -> tuple[list[int], list[int]]:
    if state in (b"", MID_TEXT):
        return [], []
    if state[0] != 1 or len(state) % 4 != 1 or len(state) < 5:
        raise ValueError("this decode state is of another tokenizer")
    count, *ids = unpack_ids(state[1:])
    return ids[:count], ids[count:]


def _pack_window(context: list[int], held: list[int]) -> bytes:
    return b"\1" + pack_ids(array("i", [len(context), *context, *held]))


def decoder_of(tokenizer: Any, vocab_size: int = 0) -> Decoder:
    """The decoder that gives what `tokenizer.decode` (a `tokenizers.Tokenizer`) gives for the whole.

    Ids beyond the tokenizer's, below the model's `vocab_size`, have no text.
    """
    tokens = _tokens(tokenizer)
    tokens += [""] * (vocab_size - len(tokens))
    special = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    kind = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    if kind.get("type") == "ByteLevel":
        return ByteDecoder([_byte_level_bytes(token) for token in tokens], special)
    fallback = _byte_fallback(kind)
    if fallback is not None:
        space, strip = fallback
        return ByteDecoder([_fallback_bytes(token, space) for token in tokens], special, strip=strip)
    return WindowDecoder(lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)), special, len(tokens))


def _tokens(tokenizer: Any) -> list[str]:
    """The token of each id; "" where there is none."""
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    tokens = [""] * (max([*vocabulary.values(), *added], default=-1) + 1)
    for token, i in vocabulary.items():
        tokens[i] = token
    for i, token in added.items():
        tokens[i] = token.content
    return tokens


def _byte_level_alphabet() -> dict[int, int]:
    """Characters that stand for a byte each, to that byte: printable ones for themselves, the rest from U+0100 on."""
    itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in itself]
    strange = dict.fromkeys(others, 0xFFFF)  # as characters, these stand for no byte
    return {**strange, **{byte: byte for byte in itself}, **{0x100 + n: byte for n, byte in enumerate(others)}}


_BYTE_LEVEL = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return token.translate(_BYTE_LEVEL).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()  # an added token, as written


def _byte_fallback(kind: dict[str, Any]) -> tuple[str, bool] | None:
    """The space character and whether a leading space is stripped, if this is sentencepiece's decoder with bytes."""
    steps = kind.get("decoders", [])
    if [step["type"] for step in steps[:3]] != ["Replace", "ByteFallback", "Fuse"] or len(steps) > 4:
        return None
    pattern = steps[0]["pattern"].get("String", "")
    if steps[0]["content"] != " " or len(pattern) != 1:
        return None
    if len(steps) == 4 and steps[3] != {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
        return None
    return pattern, len(steps) == 4


def _fallback_bytes(token: str, space: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(space, " ").encode()
