"""Incremental decoding equals decoding at once, however the ids are cut."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from services.tokenizer.decoder import Decoder, WindowDecoder, decoder_of
from services.tokenizer.loading import load
from shared.byte_decoder import ByteDecoder, UnknownIdError
from shared.messages import MID_TEXT, DecodeItem
from tests.model_factory import smollm2, tiny_tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁Hello", "▁world", "lo", "▁▁", "你", "好", "é", "a", "▁b", "!"]


@functools.cache
def byte_level() -> Tokenizer:
    tokenizer = tiny_tokenizer().backend_tokenizer
    tokenizer.add_special_tokens([AddedToken("<sep>", special=True)])
    tokenizer.add_tokens([AddedToken("你好 tool"), AddedToken("two words")])
    return tokenizer


@functools.cache
def sentencepiece(strip: bool = True) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *BYTES, *WORDS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strip else []))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def other(decoder: Any) -> Tokenizer:
    words = ["[UNK]", "hello", "##ing", "world", "▁hello", "▁", "a</w>", "b", ",", "▁你", "好"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


def stream(decoder: Decoder, ids: list[int], cuts: list[int], skip: bool = False, state: bytes = b"") -> list[str]:
    """The deltas when `ids` arrive in pieces; empty pieces too. The last piece is final."""
    edges = sorted(cut % (len(ids) + 1) for cut in cuts)
    deltas = []
    for start, end in zip([0, *edges], [*edges, len(ids)], strict=True):
        item = decoder.decode(DecodeItem(state, ids[start:end], skip, final=end == len(ids)))
        state = item.state
        deltas.append(item.text)
        assert len(state) <= 3 or not isinstance(decoder, ByteDecoder)
    return deltas


CUTS = st.lists(st.integers(0, 1000), max_size=12)


@given(st.data(), CUTS, st.booleans())
@settings(max_examples=300, deadline=None)
def test_byte_level_equals_the_tokenizers_own_decoding(data: st.DataObject, cuts: list[int], skip: bool) -> None:
    tokenizer = byte_level()
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40))
    deltas = stream(decoder_of(tokenizer), ids, cuts, skip)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=60), CUTS)
@settings(max_examples=200, deadline=None)
def test_text_streams_without_replacement_characters(text: str, cuts: list[int]) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text).ids
    deltas = stream(decoder_of(tokenizer), ids, cuts)
    assert "".join(deltas) == text
    assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas)


@given(st.lists(st.binary(max_size=5), max_size=20), CUTS)
@settings(max_examples=300, deadline=None)
def test_any_bytes_decode_as_python_does_with_replace(pieces: list[bytes], cuts: list[int]) -> None:
    deltas = stream(ByteDecoder(pieces), list(range(len(pieces))), cuts)
    assert "".join(deltas) == b"".join(pieces).decode("utf-8", "replace")


@given(st.data(), CUTS, st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_sentencepiece_with_bytes(data: st.DataObject, cuts: list[int], strip: bool, skip: bool) -> None:
    tokenizer = sentencepiece(strip)
    decoder = decoder_of(tokenizer)
    assert isinstance(decoder, ByteDecoder)
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=30))
    text = "".join(stream(decoder, ids, cuts, skip))
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in whole:
        assert text == whole
        return
    # `tokenizers` replaces a run of byte tokens with one bad byte as a whole; UTF-8 decoders replace only what is bad
    tokens = [tokenizer.id_to_token(i) for i in ids if not (skip and i in (1, 2))]
    raw = b"".join(bytes([BYTES.index(t)]) if t in BYTES else t.replace("▁", " ").encode() for t in tokens)
    assert text == raw.removeprefix(b" " if strip else b"").decode("utf-8", "replace")


@given(st.text(max_size=40), CUTS)
@settings(max_examples=100, deadline=None)
def test_sentencepiece_text_round_trips(text: str, cuts: list[int]) -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(stream(decoder_of(tokenizer), ids, cuts)) == tokenizer.decode(ids, skip_special_tokens=False)


def test_only_a_text_that_begins_loses_its_leading_space() -> None:
    decoder = decoder_of(sentencepiece())
    ids = [sentencepiece().token_to_id("▁Hello")]
    assert decoder.decode(DecodeItem(b"", ids)).text == "Hello"
    assert decoder.decode(DecodeItem(MID_TEXT, ids)).text == " Hello"
    start = sentencepiece().token_to_id("<s>")
    skipped = decoder.decode(DecodeItem(b"", [start], skip_special_tokens=True))
    assert (skipped.text, skipped.state) == ("", b"")


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.Metaspace(),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    ],
    ids=lambda decoder: type(decoder).__name__,
)
@given(data=st.data(), cuts=CUTS, skip=st.booleans())
@settings(max_examples=80, deadline=None)
def test_other_decoders_go_through_a_window(decoder: Any, data: st.DataObject, cuts: list[int], skip: bool) -> None:
    tokenizer = other(decoder)
    window = decoder_of(tokenizer)
    assert isinstance(window, WindowDecoder)
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=30))
    assert "".join(stream(window, ids, cuts, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_window_holds_half_characters_but_not_for_ever() -> None:
    tokenizer = byte_level()
    window = WindowDecoder(lambda ids: tokenizer.decode(ids, skip_special_tokens=False), [], 600)
    ids = tokenizer.encode("a🌶b").ids
    deltas = stream(window, ids, list(range(len(ids))))
    assert "".join(deltas) == "a🌶b"
    assert not any("\ufffd" in delta for delta in deltas)
    bad = tokenizer.token_to_id("ĭ")  # a lone continuation byte
    state, text = b"", ""
    for _ in range(200):
        item = window.decode(DecodeItem(state, [bad]))
        state, text = item.state, text + item.text
        assert len(state) < 400
    assert len(text) > 150


# Cases A1, A3 and A5 on the real model.


@functools.cache
def smollm2_decoder() -> Decoder:
    return load(smollm2()).decoder


def test_every_character_arrives_whole() -> None:
    codec = load(smollm2())
    text = "你好，🌶 ď 👩‍🚀 end"
    (ids,) = codec.encoder.encode([text], False)
    deltas = stream(codec.decoder, ids, list(range(len(ids))))
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_a_cut_inside_a_character_leaves_one_replacement() -> None:
    ids = [10813, 230, 131, 10813]
    assert "".join(stream(smollm2_decoder(), ids, [1, 2, 3])) == "🌶\ufffd"
    assert "".join(stream(smollm2_decoder(), ids, [])) == "🌶\ufffd"


def test_bytes_that_cannot_become_a_character_are_replaced_at_once() -> None:
    decoder, state, texts = smollm2_decoder(), b"", []
    codec = load(smollm2())
    ids = [230, 230, 230, 230, *codec.encoder.encode([" ok"], False)[0], 10813, 230, 131]
    for i in ids:
        item = decoder.decode(DecodeItem(state, [i]))
        state = item.state
        texts.append(item.text)
    assert texts == ["\ufffd"] * 4 + [" ok", "", "", "🌶"]


def test_unknown_ids_are_named() -> None:
    for bad in (49152, -1, 1 << 40):
        for ids in ([bad], [5, bad], [bad, 5]):
            with pytest.raises(UnknownIdError, match=f"token id {bad} "):
                smollm2_decoder().decode(DecodeItem(b"", ids))
    with pytest.raises(UnknownIdError, match="token id 99"):
        WindowDecoder(lambda ids: "", [], 99).decode(DecodeItem(b"", [99]))


def test_ids_of_a_padded_model_have_no_text() -> None:
    decoder = decoder_of(byte_level(), 1000)
    assert decoder.decode(DecodeItem(MID_TEXT, [999])).text == ""
    with pytest.raises(UnknownIdError):
        decoder.decode(DecodeItem(MID_TEXT, [1000]))


@pytest.mark.parametrize("state", [b"\xf0\x9f\x8c\xb6x", b"\1ab", b"\7abcd", b"\1"])
def test_a_foreign_state_is_an_error(state: bytes) -> None:
    window = WindowDecoder(lambda ids: "x" * len(ids), [], 10)
    with pytest.raises(ValueError, match="decode state"):
        (ByteDecoder([b"a"]) if len(state) > 3 and state[0] > 7 else window).decode(DecodeItem(state, [0]))


def test_decoding_costs_microseconds() -> None:
    """The budget is 3 µs per token; measured about 0.7 µs, the margin is for slow machines."""
    decoder = smollm2_decoder()
    items = [DecodeItem(MID_TEXT, [1000 + i]) for i in range(32)]
    best = 1.0
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(20):
            for item in items:
                decoder.decode(item)
        best = min(best, (time.perf_counter() - start) / 640)
    assert best < 3e-6


def test_the_byte_level_alphabet_is_the_tokenizers_own() -> None:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {character: i for i, character in enumerate(sorted(alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    decoder = decoder_of(tokenizer)
    found = {decoder.decode(DecodeItem(b"", [i], final=True)).text for i in vocabulary.values()}
    assert found == {bytes([byte]).decode("utf-8", "replace") for byte in range(256)}
