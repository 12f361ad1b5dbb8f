"""The stop-string matcher against a plain search of the whole text."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.stops import StopMatcher, StopPattern

LETTERS = "ab"  # few letters, so that overlaps and near misses are common

texts = st.text(alphabet=LETTERS, max_size=40)
stop_lists = st.lists(st.text(alphabet=LETTERS, min_size=1, max_size=5), min_size=0, max_size=4)


def cut(text: str, stops: list[str], include: bool, first_end: int = 1) -> tuple[str, str | None]:
    """The specification: the match with the smallest end (at least `first_end`), then the first in the list."""
    for end in range(first_end, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def pieces(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


def run(chunks: list[str], stops: list[str], include: bool) -> tuple[list[str], StopMatcher]:
    matcher = StopMatcher(stops, include=include)
    out: list[str] = []
    for chunk in chunks:
        out.append(matcher.feed(chunk))
        if matcher.matched is not None:
            return out, matcher
    out.append(matcher.flush())
    return out, matcher


@given(texts, stop_lists, st.booleans(), st.lists(st.integers(0, 40), max_size=12))
@example("aab", ["ab"], False, [1, 2])
@example("abab", ["abb", "ba"], True, [2])
@example("aab", ["b", "ab"], False, [])
@example("aab", ["ab", "b"], False, [])
def test_any_chunking_gives_the_text_up_to_the_first_completed_match(
    text: str, stops: list[str], include: bool, cuts: list[int]
) -> None:
    out, matcher = run(pieces(text, cuts), stops, include)
    assert ("".join(out), matcher.matched) == cut(text, stops, include)


@given(texts, stop_lists)
def test_holds_back_exactly_what_could_begin_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    passed = ""
    for position, character in enumerate(text):
        passed += matcher.feed(character)
        if matcher.matched is not None:
            return
        seen = text[: position + 1]
        begins = [k for stop in stops for k in range(1, len(stop)) if seen.endswith(stop[:k])]
        assert len(seen) - len(passed) == max(begins, default=0)


@given(texts, texts, stop_lists, st.booleans(), st.lists(st.integers(0, 40), max_size=6))
def test_a_match_completed_before_min_tokens_does_not_count(
    before: str, after: str, stops: list[str], include: bool, cuts: list[int]
) -> None:
    matcher = StopMatcher(stops, include=include)
    out = "".join(matcher.feed(piece, honour=False) for piece in pieces(before, cuts))
    assert matcher.matched is None
    for piece in pieces(after, cuts):
        if matcher.matched is None:
            out += matcher.feed(piece)
    if matcher.matched is None:
        out += matcher.flush()
    expected, stop = cut(before + after, stops, include, first_end=len(before) + 1)
    assert (out, matcher.matched) == (expected, stop)


@given(texts, stop_lists, st.lists(st.integers(0, 40), max_size=12))
def test_end_is_the_offset_in_the_piece_that_completed_the_match(text: str, stops: list[str], cuts: list[int]) -> None:
    chunks = pieces(text, cuts)
    out, matcher = run(chunks, stops, True)
    if matcher.matched is not None:
        before = "".join(chunks[: len(out) - 1])
        assert len(before) + matcher.end == len("".join(out))


def test_straddles_tokens_and_cuts_inside_one() -> None:
    assert run(["Hello", " world", " again"], ["orl"], False)[0] == ["Hell", "o w"]
    assert run(["Hello", " world", " again"], ["orl"], True)[0] == ["Hell", "o worl"]
    assert run(["a \n", "\nUs", "er:", " x"], ["\n\nUser:"], False)[0] == ["a ", "", ""]


def test_flushes_an_unfinished_beginning_at_the_end() -> None:
    assert run(["one <", "|im"], ["<|im_end|>"], False)[0] == ["one ", "", "<|im"]
    matcher = StopMatcher(["b"])
    assert (matcher.feed("ab"), matcher.flush()) == ("a", "")


def test_without_stops_text_passes_through() -> None:
    assert run(["a", "b"], [], False)[0] == ["a", "b", ""]


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopPattern("")


@pytest.mark.parametrize("size", [20_000])
def test_work_is_linear_in_the_text(size: int) -> None:
    def seconds(length: int) -> float:
        matcher = StopMatcher(["a" * length + "b"])
        start = time.process_time()
        for _ in range(length):
            matcher.feed("aaaa")
        return time.process_time() - start

    seconds(100)
    assert seconds(size) < 40 * seconds(size // 8) + 0.1  # quadratic work would be 64 times as long
