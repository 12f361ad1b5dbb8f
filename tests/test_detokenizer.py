"""The detokenizer, answered by hand: what goes into a Decode, and what becomes of late or refused answers."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from shared.byte_decoder import ByteDecoder
from shared.detokenizer import SPLIT, Detokenizer, Stream
from shared.errors import RequestError
from shared.generation import Generation
from shared.journal import Journal
from shared.local_decoder import LocalDecoder
from shared.messages import Decode, Decoded, Delta
from shared.sampling import SamplingParams
from shared.tokenizer_pool import Answer
from shared.turn import Turn
from tests.engine_fakes import EOS, decode_item


class HandPool:
    """Calls wait here until the test answers them."""

    def __init__(self) -> None:
        self.connected = 1
        self.calls: list[tuple[Decode, Callable[[Answer], None]]] = []

    def call(self, message: Decode, on_answer: Callable[[Answer], None]) -> int:
        self.calls.append((message, on_answer))
        return len(self.calls)


class Rig:
    """A detokenizer and the streams given to it."""

    def __init__(self) -> None:
        self.pool = HandPool()
        self.stopped: list[Stream] = []
        self.ended: list[Stream] = []
        self.failed: list[tuple[Stream, RequestError]] = []
        self.local = LocalDecoder(self.pool)  # type: ignore[arg-type]
        self.detokenizer = Detokenizer(
            self.pool,  # type: ignore[arg-type]
            self.local,
            self.stopped.append,
            self.ended.append,
            lambda stream, error: self.failed.append((stream, error)),
        )
        self.journal = Journal()

    def stream(self, *stops: str, **values: object) -> Stream:
        params = SamplingParams(**({"max_tokens": 99, "seed": 1} | values))  # type: ignore[arg-type]
        entry = self.journal.open(array("i", [1]), params, now=0.0)[0]
        stream = Stream(entry, Generation(1, lambda: None, Turn()), 0, list(stops), [])
        stream.siblings.append(stream)
        return stream

    def receive(self, stream: Stream, text: str, finish: str = "", extra: tuple[int, ...] = ()) -> None:
        """A delta with the bytes of `text` and `extra` ids."""
        entry = stream.entry
        entry.accept(Delta(entry.id, 0, len(entry.output), [*text.encode(), *extra], finish))
        self.detokenizer.push(stream)

    def flush(self) -> list[list[list[int]]]:
        """The ids in each Decode that a wake-up sends."""
        before = len(self.pool.calls)
        self.detokenizer.flush()
        return [[item.ids for item in message.items] for message, _ in self.pool.calls[before:]]

    def answer(self) -> None:
        """Answers the oldest call."""
        message, on_answer = self.pool.calls.pop(0)
        on_answer(Decoded(0, [decode_item(item) for item in message.items]))

    def refuse(self) -> None:
        self.pool.calls.pop(0)[1](RequestError("unknown id"))


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_stream_has_one_decode_out_and_what_comes_meanwhile_is_merged(rig: Rig) -> None:
    stream = rig.stream()
    rig.receive(stream, "a")
    assert rig.flush() == [[[97]]]
    rig.receive(stream, "b")
    rig.receive(stream, "c")
    assert rig.flush() == []
    rig.answer()
    assert rig.flush() == [[[98, 99]]]
    rig.answer()
    assert rig.flush() == []
    assert stream.generation.samples[0].text == "abc"


def test_an_end_without_text_needs_no_decode(rig: Rig) -> None:
    stream = rig.stream("zz")
    rig.receive(stream, "az")
    rig.flush()
    rig.answer()
    rig.receive(stream, "", "stop", (EOS,))
    assert rig.flush() == []
    sample = stream.generation.samples[0]
    assert (sample.text, sample.ids, sample.finish_reason) == ("az", [97, 122, EOS], "stop")
    assert rig.ended == [stream]


def test_half_a_character_is_asked_for_at_an_end_without_text(rig: Rig) -> None:
    stream = rig.stream()
    rig.receive(stream, "", extra=(0xC3,))
    rig.flush()
    rig.answer()
    rig.receive(stream, "", "stop", (EOS,))
    assert rig.flush() == [[[]]]
    rig.answer()
    assert stream.generation.samples[0].text == "\ufffd"


def test_big_batches_are_divided_among_tokenizers(rig: Rig) -> None:
    for connected, sizes in ((1, [3 * SPLIT]), (2, [96, 96]), (8, [SPLIT] * 3)):
        rig.pool.connected = connected
        for _ in range(3 * SPLIT):
            rig.receive(rig.stream(), "a")
        assert [len(call) for call in rig.flush()] == sizes


def test_a_stop_string_in_merged_ids_is_traced_to_its_token(rig: Rig) -> None:
    stream = rig.stream("llo w")
    rig.receive(stream, "Hello world")
    rig.flush()
    rig.answer()
    assert rig.stopped == [stream]
    assert not rig.ended
    assert stream.entry.finish == "stop"
    rig.answer()
    sample = stream.generation.samples[0]
    assert (sample.text, bytes(sample.ids), sample.stop_reason) == ("He", b"Hello w", "llo w")
    assert rig.ended == [stream]


def test_a_stop_string_on_the_last_token_of_an_ended_sequence_needs_no_abort(rig: Rig) -> None:
    stream = rig.stream("d")
    rig.receive(stream, "world", "length")
    rig.flush()
    rig.answer()
    rig.answer()
    assert (stream.generation.samples[0].finish_reason, stream.generation.samples[0].ids[-1]) == ("stop", 100)
    assert not rig.stopped


@pytest.mark.parametrize("end", ["answer", "refuse"])
def test_answers_for_what_was_aborted_are_dropped(rig: Rig, end: str) -> None:
    streams = [rig.stream(), rig.stream("bc")]
    for stream in streams:
        rig.receive(stream, "abcd")
    rig.flush()
    streams[0].closed = True
    rig.answer()  # leaves the question where the stop string ended
    streams[1].closed = True
    getattr(rig, end)()
    rig.receive(streams[0], "x")
    assert rig.flush() == []
    assert [stream.generation.samples[0].ids for stream in streams] == [[], []]
    assert rig.ended == rig.failed == []


def test_of_a_refused_batch_only_the_refused_stream_fails(rig: Rig) -> None:
    bad, good, gone = rig.stream(), rig.stream(), rig.stream()
    for stream in (bad, good, gone):
        rig.receive(stream, "a", "length")
    rig.flush()
    rig.refuse()
    assert [len(message.items) for message, _ in rig.pool.calls] == [1, 1, 1]
    rig.refuse()
    rig.answer()
    gone.closed = True
    rig.refuse()
    assert [(stream, error.status) for stream, error in rig.failed] == [(bad, 500)]
    assert rig.ended == [good]


def test_if_the_token_of_a_stop_cannot_be_found_the_stream_fails(rig: Rig) -> None:
    stream = rig.stream("b")
    rig.receive(stream, "abc")
    rig.flush()
    rig.answer()
    rig.refuse()
    assert [error.status for _, error in rig.failed] == [500]


def test_a_stream_closed_before_the_flush_is_left_out(rig: Rig) -> None:
    stream = rig.stream()
    rig.receive(stream, "a")
    stream.closed = True
    assert rig.flush() == []


# With the vocabulary at hand


@pytest.fixture
def here(rig: Rig) -> Rig:
    """A rig that decodes by itself: bytes, then 43 ids without text."""
    rig.local.decoder = ByteDecoder([bytes([i]) for i in range(256)] + [b""] * 43)
    return rig


def test_text_is_there_at_once_and_nothing_is_asked_for(here: Rig) -> None:
    stream = here.stream()
    here.receive(stream, "w", extra=(0xC3,))
    assert here.flush() == []
    assert stream.generation.samples[0].text == "w"
    here.receive(stream, "", "length", (0xB6,))
    here.flush()
    sample = stream.generation.samples[0]
    assert (sample.text, sample.ids, sample.finish_reason) == ("wö", [119, 0xC3, 0xB6], "length")
    assert here.ended == [stream]


def test_ids_on_both_sides_of_min_tokens_take_two_rounds(here: Rig) -> None:
    stream = here.stream("b", min_tokens=3)
    here.receive(stream, "abcab")
    here.flush()
    assert here.stopped == [stream]
    sample = stream.generation.samples[0]
    assert (sample.text, sample.ids, sample.stop_reason) == ("abca", [97, 98, 99, 97, 98], "b")


def test_a_stop_string_is_traced_to_its_token_here_too(here: Rig) -> None:
    stream = here.stream("llo w")
    here.receive(stream, "hello world")
    here.flush()
    sample = stream.generation.samples[0]
    assert (sample.text, bytes(sample.ids)) == ("he", b"hello w")


def test_an_end_without_text_needs_no_decode_here_too(here: Rig) -> None:
    stream = here.stream()
    here.receive(stream, "a")
    here.flush()
    here.receive(stream, "", "stop", (EOS,))
    here.flush()
    assert stream.generation.samples[0].ids == [97, EOS]
    assert here.ended == [stream]


def test_where_all_streams_were_closed_nothing_is_decoded(here: Rig) -> None:
    closed, later = here.stream(), here.stream()
    here.receive(closed, "a")
    closed.closed = True
    here.flush()
    here.receive(later, "b")
    here.flush()
    assert [stream.generation.samples[0].text for stream in (closed, later)] == ["", "b"]


def test_an_unknown_id_fails_its_own_stream(here: Rig) -> None:
    good, bad = here.stream(), here.stream()
    here.receive(good, "a")
    here.receive(bad, "b", extra=(299,))
    here.flush()
    assert good.generation.samples[0].text == "a"
    [(stream, error)] = here.failed
    assert stream is bad
    assert error.status == 500
    assert "token id 299 is not in the vocabulary of 299" in error.message


def test_an_answer_that_is_out_when_the_vocabulary_comes_is_taken(rig: Rig) -> None:
    stream = rig.stream()
    rig.receive(stream, "a")
    assert rig.flush() == [[[97]]]
    rig.local.decoder = ByteDecoder([bytes([i]) for i in range(256)])
    rig.receive(stream, "b")
    rig.flush()
    assert stream.generation.samples[0].text == ""
    rig.answer()
    rig.flush()
    assert stream.generation.samples[0].text == "ab"
