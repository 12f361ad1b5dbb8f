"""Tokenizers built from GGUF metadata equal those of the Hugging Face files the metadata was made from."""

from __future__ import annotations

import functools
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers

from services.tokenizer.gguf_tokenizer import BuiltTokenizer, build
from services.tokenizer.pretokenizers import SPLITTINGS, splitting
from shared.errors import StartupError
from shared.gguf_file import GGUFFile
from tests.model_factory import CORPUS, smollm2, tiny_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
COVERED = st.characters(min_codepoint=0x20, max_codepoint=0xFFFF, codec="utf-8")  # SmolLM2 lacks tokens for 21 bytes
SAMPLES = ["Hello WORLD's 12345 你好, x=3;\n\n  foo()  /bar", " a  b\t\r\n c ", "", "don't WE'LL", "é e\u0301 ١٢٣"]


@functools.cache
def bundled() -> BuiltTokenizer:
    with GGUFFile(smollm2()) as file:
        return build(file.metadata)


@functools.cache
def byte_level_metadata() -> dict[str, Any]:
    """The tiny tokenizer as a GGUF file would hold it."""
    model = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if i < 3 else NORMAL for i in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@functools.cache
def sentencepiece() -> tuple[Tokenizer, dict[str, Any]]:
    """A BPE with byte fallback as Llama-2's tokenizer.json, and as a GGUF file would hold it."""
    escape = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = escape
    specials = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=specials, show_progress=False)
    trained.train_from_iterator(CORPUS.splitlines(), trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=model["vocab"], merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = escape
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials[:3]])
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 259)]
    return tokenizer, {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [float(-ranks.get(token, 0)) for token in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("🌶", [10813, 230, 131]),
        ("}}", [17859]),
        (" world", [905]),
        ("", []),
        ("12", [33, 34]),  # digits are never merged
        ("<|im_start|>", [1]),
    ],
)
def test_known_ids_of_the_bundled_model(text: str, ids: list[int]) -> None:
    assert bundled().tokenizer.encode(text).ids == ids


@given(st.text(COVERED, max_size=80))
@settings(max_examples=100, deadline=None)
def test_the_bundled_tokenizer_loses_nothing(text: str) -> None:
    ids = bundled().tokenizer.encode(text).ids
    assert bundled().tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_bundled_model_brings_template_and_special_tokens() -> None:
    assert "<|im_start|>" in bundled().chat_templates["default"]
    assert bundled().special_tokens["eos_token"] == "<|im_end|>"


def test_the_bundled_tokenizer_loads_in_under_a_second() -> None:
    start = time.process_time()
    with GGUFFile(smollm2()) as file:
        build(file.metadata)
    assert time.process_time() - start < 1.0


@given(st.text(max_size=80))
@settings(max_examples=100, deadline=None)
def test_byte_level_ids_equal_the_original(text: str) -> None:
    built = build(byte_level_metadata()).tokenizer
    assert built.encode(text).ids == _tiny().encode(text).ids


@functools.cache
def _tiny() -> Tokenizer:
    return tiny_tokenizer().backend_tokenizer


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="▁"), max_size=60))
@settings(max_examples=200, deadline=None)
def test_sentencepiece_ids_equal_the_original(text: str) -> None:
    original, _ = sentencepiece()
    assert _built_sentencepiece().encode(text, add_special_tokens=False).ids == original.encode(text).ids


@functools.cache
def _built_sentencepiece() -> Tokenizer:
    return build(sentencepiece()[1]).tokenizer


@pytest.mark.parametrize("text", ["the scheduler owned the blocks", "Once</s> upon <s>time", "  two", "你🌶\n"])
def test_sentencepiece_words(text: str) -> None:
    original, _ = sentencepiece()
    built = _built_sentencepiece()
    assert built.encode(text, add_special_tokens=False).ids == original.encode(text).ids
    assert built.encode(text).ids[0] == 1, "llama-type files add a BOS unless they say otherwise"
    if "<" not in text:
        assert built.decode(built.encode(text).ids) == text


def test_sentencepiece_without_space_prefix() -> None:
    built = build({**sentencepiece()[1], "tokenizer.ggml.add_space_prefix": False}).tokenizer
    ids = built.encode("Once", add_special_tokens=False).ids
    assert not built.id_to_token(ids[0]).startswith("▁")
    assert built.decode(built.encode(" Once").ids) == " Once"


def test_ends_are_added_as_the_file_says() -> None:
    both = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    ids = build({**byte_level_metadata(), **both}).tokenizer.encode("a").ids
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)
    assert len(build(byte_level_metadata()).tokenizer.encode("a").ids) == 1
    llama3 = {**byte_level_metadata(), "tokenizer.ggml.pre": "llama-bpe"}
    assert build(llama3).tokenizer.encode("a").ids[0] == 1
    never = build({**sentencepiece()[1], "tokenizer.ggml.add_bos_token": False}).tokenizer
    assert never.encode("").ids == []


def test_user_defined_tokens_match_whole_and_are_no_special_tokens() -> None:
    metadata = dict(byte_level_metadata())
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<tool call>", "[PAD513]"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], USER_DEFINED, UNUSED]
    tokenizer = build(metadata).tokenizer
    assert tokenizer.encode("a<tool call>b").ids[1] == 512
    assert tokenizer.decode([512], skip_special_tokens=True) == "<tool call>"
    assert tokenizer.id_to_token(513) is None, "padding of the vocabulary is no token"


def _transformers_backend(name: str) -> Any:
    import transformers

    return getattr(transformers, name)(vocab={"a": 0}, merges=[]).backend_tokenizer


@pytest.mark.parametrize(
    ("pre", "name"), [("qwen2", "Qwen2Tokenizer"), ("gpt-2", "GPT2Tokenizer"), ("command-r", "CohereTokenizer")]
)
def test_splitting_equals_that_of_transformers(pre: str, name: str) -> None:
    theirs = _transformers_backend(name)
    ours = splitting(pre)
    for text in SAMPLES:
        assert ours.pre_tokenizer().pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text)
    assert (ours.normalizer() is None) == (theirs.normalizer is None)


@pytest.mark.parametrize("pre", sorted(SPLITTINGS))
def test_every_splitting_keeps_every_byte(pre: str) -> None:
    decode = decoders.ByteLevel().decode
    for text in SAMPLES:
        pieces = [piece for piece, _ in splitting(pre).pre_tokenizer().pre_tokenize_str(text)]
        assert decode(pieces) == text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("llama-bpe", "I'LL pay 12345!\n\n", ["I", "'LL", "Ġpay", "Ġ", "123", "45", "!ĊĊ"]),
        ("qwen2", "I'LL pay 12", ["I", "'LL", "Ġpay", "Ġ", "1", "2"]),
        ("gpt-4o", "HelloWorld it's", ["Hello", "World", "Ġit's"]),
        ("tekken", "HelloWorld it's", ["Hello", "World", "Ġit", "'s"]),
        ("deepseek-v3", "a一二b 1234", ["a", "ä¸ĢäºĮ", "b", "Ġ", "123", "4"]),
        ("smollm", "a 12", ["a", "Ġ", "1", "2"]),
        ("gpt-2", "a 12's", ["a", "Ġ12", "'s"]),
        ("viking", "a 12", ["a", "Ġ", "1", "2"]),
        ("falcon", "a!? 1234", ["a", "!?", "Ġ", "123", "4"]),
    ],
)
def test_where_splittings_differ(pre: str, text: str, pieces: list[str]) -> None:
    assert [piece for piece, _ in splitting(pre).pre_tokenizer().pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer.ggml.pre": "nobody-knows"}, "'nobody-knows'"),
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv'"),
        ({"tokenizer.ggml.token_type": [1]}, "1 token types"),
        ({"tokenizer.ggml.merges": ["a nothing"]}, "do not fit together"),
    ],
)
def test_what_cannot_be_built_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(StartupError, match=said):
        build({**byte_level_metadata(), **change})


@pytest.mark.parametrize("missing", ["model", "tokens", "merges"])
def test_missing_metadata_is_named(missing: str) -> None:
    metadata = {k: v for k, v in byte_level_metadata().items() if k != f"tokenizer.ggml.{missing}"}
    with pytest.raises(StartupError, match=f"no tokenizer.ggml.{missing}"):
        build(metadata)


def test_a_file_without_pre_tokenizer_name_is_taken_for_gpt2() -> None:
    metadata = {k: v for k, v in byte_level_metadata().items() if k != "tokenizer.ggml.pre"}
    assert build(metadata).tokenizer.encode("the blocks").ids == _tiny().encode("the blocks").ids


def test_named_templates_are_kept_apart() -> None:
    more = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    assert build({**byte_level_metadata(), **more}).chat_templates == {"default": "plain", "tool_use": "tools"}
