"""Builds a tokenizer from a GGUF file's metadata (keys: `tokenizer.ggml.*` of the GGUF specification)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from services.tokenizer.pretokenizers import splitting
from shared.errors import StartupError

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # values of tokenizer.ggml.token_type
SPACE = "\u2581"  # how sentencepiece writes a space
SPECIAL_NAMES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep"}


@dataclass(frozen=True)
class BuiltTokenizer:
    """A tokenizer and what the chat template needs beside it."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]  # "bos_token": "<s>" ...
    chat_templates: dict[str, str]  # "default", and others by name


def build(metadata: Mapping[str, Any]) -> BuiltTokenizer:
    """The tokenizer in a GGUF file's metadata. Raises StartupError for a kind that is not known, or that is broken."""
    kind = _get(metadata, "model")
    tokens: list[str] = _get(metadata, "tokens")
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise StartupError(f"the GGUF file has {len(tokens)} tokens but {len(types)} token types")
    vocabulary = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED or token != f"[PAD{i}]"}
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(metadata, vocabulary)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(metadata, vocabulary)
    else:
        raise StartupError(f"tokenizer.ggml.model is {kind!r}, which is not supported: gpt2 and llama are")
    _add_tokens(tokenizer, tokens, types)
    special = _special_tokens(metadata, tokens)
    _add_ends(tokenizer, metadata, special, add_bos, vocabulary)
    return BuiltTokenizer(tokenizer, special, _chat_templates(metadata))


def _get(metadata: Mapping[str, Any], name: str) -> Any:
    try:
        return metadata[f"tokenizer.ggml.{name}"]
    except KeyError:
        raise StartupError(f"the GGUF file has no tokenizer.ggml.{name}: it brings no usable tokenizer") from None


def _byte_level(metadata: Mapping[str, Any], vocabulary: dict[str, int]) -> tuple[Tokenizer, bool]:
    split = splitting(metadata.get("tokenizer.ggml.pre") or "default")
    merges = [_pair(merge) for merge in _get(metadata, "merges")]
    tokenizer = _bpe(vocabulary, merges, ignore_merges=split.ignore_merges)
    normalizer = split.normalizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = split.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.add_bos


def _pair(merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)
    return merge[:cut], merge[cut + 1 :]


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: dict[str, int]) -> tuple[Tokenizer, bool]:
    scores: list[float] = _get(metadata, "scores")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    names = [token for token, i in vocabulary.items() if i == unknown]
    tokenizer = _bpe(
        vocabulary,
        merges_of(vocabulary, scores),
        unk_token=names[0] if names else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    escape: list[Any] = [normalizers.Replace(" ", SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *escape] if prefix else escape)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def merges_of(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Sentencepiece keeps no merges: every pair whose join is a token is one, the best score first.

    Equal scores (two ways to make one token) are in the order of transformers' conversion: the longest left part first.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for token, i in vocabulary.items():
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[i], -cut, cut - len(token), left, right))
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in found]


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # `tokenizers` raises bare exceptions
        raise StartupError(f"the GGUF file's vocabulary and merges do not fit together: {error}") from None


def _add_tokens(tokenizer: Tokenizer, tokens: Iterable[str], types: Iterable[int]) -> None:
    """Makes control and user-defined tokens match as a whole, before anything is split."""
    pairs = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, kind in pairs if kind == CONTROL]
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, kind in pairs if kind == USER_DEFINED])


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    out = {}
    for key, name in SPECIAL_NAMES.items():
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            out[f"{name}_token"] = tokens[number]
    return out


def _add_ends(
    tokenizer: Tokenizer,
    metadata: Mapping[str, Any],
    special: Mapping[str, str],
    add_bos: bool,
    vocabulary: Mapping[str, int],
) -> None:
    """BOS before and EOS after every encoded text, where the file or its kind wants them."""
    bos = special.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", add_bos) else None
    eos = special.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    ends = [token for token in (bos, eos) if token is not None]
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
            special_tokens=[(token, vocabulary[token]) for token in dict.fromkeys(ends)],
        )


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    out = {}
    for key in metadata:
        if key == prefix:
            out["default"] = str(metadata[key])
        elif key.startswith(f"{prefix}."):
            out[key.removeprefix(f"{prefix}.")] = str(metadata[key])
    return out
