"""Ids to text for vocabularies whose every token is some bytes.

A state is b"" at the start of a text, and after that b"\\0" (`MID_TEXT`), or the 1 to 3 bytes that may still become a
character (they never begin with 0).
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable, Sequence

from shared.messages import MID_TEXT, DecodedItem, DecodeItem


class UnknownIdError(ValueError):
    """An id that is not in the vocabulary."""


class ByteDecoder:
    """For vocabularies whose every token is some bytes: their concatenation is the text, in UTF-8.

    Bytes that can no longer become a character are replaced at once, each maximal subpart by one U+FFFD (Unicode 15,
    section 3.9; as Python's and Rust's decoders do).
    """

    def __init__(self, pieces: Sequence[bytes], special: Iterable[int] = (), *, strip: bool = False) -> None:
        """`pieces[id]`: the token's bytes; `special`: ids to skip on demand; `strip`: drop a text's leading space."""
        self.pieces = list(pieces)
        self.special = list(special)
        self.strip = strip
        self._plain = list(pieces)
        for i in self.special:
            self._plain[i] = b""

    def decode(self, item: DecodeItem) -> DecodedItem:
        """The new text and the new state. Raises UnknownIdError, and ValueError for a state that is none of these."""
        pieces = self._plain if item.skip_special_tokens else self.pieces
        ids, state = item.ids, item.state
        try:
            data = pieces[ids[0]] if len(ids) == 1 else b"".join([pieces[i] for i in ids])
        except IndexError:
            data = None
        if data is None or (ids and min(ids) < 0):
            raise UnknownIdError(unknown_id(ids, len(pieces)))
        if state == b"":
            if not data:
                return DecodedItem("", b"")
            if self.strip and data[0] == 0x20:
                data = data[1:]
        elif state != MID_TEXT:
            if len(state) > 3:
                raise ValueError("this decode state is of another tokenizer")
            data = state + data
        text, used = utf_8_decode(data, "replace", item.final)
        return DecodedItem(text, MID_TEXT if used == len(data) else data[used:])


def unknown_id(ids: Iterable[int], vocab_size: int) -> str:
    """What is wrong with ids of which one at least is not in the vocabulary."""
    wrong = next(i for i in ids if not 0 <= i < vocab_size)
    return f"token id {wrong} is not in the vocabulary of {vocab_size}"
