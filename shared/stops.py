"""Stop strings over streamed text.

The match that completes first ends the text; of several that complete at the same character the first in the list wins.
A match may begin in one piece of text and end in a later one. What could still be the beginning of a match is held
back, nothing else, so that what is passed on never has to be taken back. Work is linear in the text: one
Knuth-Morris-Pratt automaton per stop string (Knuth, Morris, Pratt 1977).
"""

from __future__ import annotations

from collections import deque


class StopPattern:
    """One stop string, and how much of its beginning the text seen so far ends with."""

    __slots__ = ("_borders", "length", "matched", "string")

    def __init__(self, string: str) -> None:
        if not string:
            raise ValueError("a stop string must not be empty")
        self.string = string
        self.length = len(string)
        self.matched = 0  # characters; below `length`
        self._borders: list[int] | None = None

    def advance(self, text: str, *, honour: bool) -> int:
        """Reads `text`; the offset in it just after the first complete match, or -1. Stops reading there.

        With `honour` False complete matches are passed over.
        """
        string, length, matched = self.string, self.length, self.matched
        position, end = 0, len(text)
        while position < end:
            if matched == 0:
                position = text.find(string[0], position)
                if position < 0:
                    break
            if text[position] == string[matched]:
                matched += 1
                position += 1
                if matched == length:
                    if honour:
                        self.matched = 0
                        return position
                    matched = self.borders[length]
            else:  # matched > 0, because `find` went to a first character
                matched = self.borders[matched]
        self.matched = matched
        return -1

    @property
    def borders(self) -> list[int]:
        """`borders[k]`: length of the longest proper prefix of the string's first k characters that also ends them."""
        if self._borders is None:
            string = self.string
            borders = [0, 0]
            border = 0
            for character in string[1:]:
                while border and character != string[border]:
                    border = borders[border]
                border += character == string[border]
                borders.append(border)
            self._borders = borders
        return self._borders


class StopMatcher:
    """Passes text on up to the first stop string.

    `include`: the stop string itself is passed on too. After a match, `matched` names it and `end` is the offset just
    after it in the piece of text that completed it; no text may follow.
    """

    __slots__ = ("_held", "_include", "_offset", "_patterns", "_pieces", "end", "matched")

    def __init__(self, stops: list[str], *, include: bool = False) -> None:
        self._patterns = [StopPattern(stop) for stop in stops]
        self._include = include
        self._pieces: deque[str] = deque()  # the text held back, except the first `_offset` characters
        self._offset = 0
        self._held = 0  # characters held back
        self.matched: str | None = None
        self.end = 0

    def feed(self, text: str, *, honour: bool = True) -> str:
        """Takes the next piece of text; returns what may be passed on.

        `honour` False: a match that completes in this piece does not count (min_tokens not reached); one that begins in
        it and completes later does.
        """
        if not self._patterns:
            return text
        first = -1
        for pattern in self._patterns:
            end = pattern.advance(text, honour=honour)
            if end >= 0 and (first < 0 or end < first):
                first, self.matched = end, pattern.string
        if self.matched is not None:
            self.end = first
            keep = len(text) - first + (0 if self._include else len(self.matched))
        else:
            keep = max([pattern.matched for pattern in self._patterns])
        return self._pass_on(text, keep)

    def flush(self) -> str:
        """What was held back, once no more text follows; nothing after a match."""
        return "" if self.matched is not None else self._pass_on("", 0)

    def _pass_on(self, text: str, keep: int) -> str:
        """Appends `text` to what is held back and takes all but the last `keep` characters."""
        if self._held == 0 and keep == 0:
            return text
        self._pieces.append(text)
        count = self._held + len(text) - keep
        self._held = keep
        taken = []
        while count:
            piece = self._pieces[0]
            end = min(len(piece), self._offset + count)
            taken.append(piece[self._offset : end])
            count -= end - self._offset
            self._offset = end
            if end == len(piece):
                self._pieces.popleft()
                self._offset = 0
        return "".join(taken)
