"""A vocabulary is asked for until it is known, and belongs to one model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shared.errors import RequestError
from shared.local_decoder import LocalDecoder
from shared.messages import MID_TEXT, DecodeItem, GetVocabulary, Vocabulary
from shared.tokenizer_pool import Answer


class HandPool:
    """Calls wait here until the test answers them."""

    def __init__(self) -> None:
        self.calls: list[tuple[GetVocabulary, Callable[[Answer], None]]] = []

    def call(self, message: GetVocabulary, on_answer: Callable[[Answer], None]) -> int:
        self.calls.append((message, on_answer))
        return len(self.calls)

    def answer(self, answer: Answer) -> str:
        """Answers the oldest call; the model it was about."""
        message, on_answer = self.calls.pop(0)
        on_answer(answer)
        return message.model


@pytest.fixture
def pool() -> HandPool:
    return HandPool()


@pytest.fixture
def local(pool: HandPool) -> LocalDecoder:
    return LocalDecoder(pool)  # type: ignore[arg-type]


def test_it_is_asked_for_once_and_again_after_a_refusal(pool: HandPool, local: LocalDecoder) -> None:
    local.ask()
    assert not pool.calls  # no model is served yet
    local.serve("m")
    local.serve("m")
    local.ask()
    assert len(pool.calls) == 1
    assert pool.answer(RequestError("not that model")) == "m"
    assert local.decoder is None
    local.ask()
    assert pool.answer(Vocabulary(0, [b"a", b"\xc3", b"<s>"], [2], False)) == "m"
    local.ask()
    assert not pool.calls
    assert local.decoder is not None
    decoded = local.decoder.decode(DecodeItem(MID_TEXT, [0, 2, 1]))
    assert (decoded.text, decoded.state) == ("a", b"\xc3")


def test_without_pieces_only_a_tokenizer_can_decode(pool: HandPool, local: LocalDecoder) -> None:
    local.serve("m")
    pool.answer(Vocabulary(0, []))
    local.ask()
    assert local.decoder is None
    assert not pool.calls


def test_another_model_has_another_vocabulary(pool: HandPool, local: LocalDecoder) -> None:
    local.serve("m")
    pool.answer(Vocabulary(0, [b"a"]))
    local.serve("n")
    assert local.decoder is None
    local.serve("o")  # while the answer for n is out
    assert pool.answer(Vocabulary(0, [b"n"])) == "n"
    assert local.decoder is None
    local.ask()
    assert pool.answer(Vocabulary(0, [b"o"])) == "o"
    assert local.decoder is not None
    assert local.decoder.pieces == [b"o"]
