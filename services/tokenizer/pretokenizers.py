"""How byte-level BPE tokenizers split text before merging, by the name that GGUF files give (`tokenizer.ggml.pre`).

Each entry is the normalizer and the pre-tokenizer of the model's own tokenizer.json, from which the name was taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from shared.errors import StartupError

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _TAIL
SEED_CODER = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _TAIL
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_WORD_UP = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_WORD_DOWN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
TEKKEN = rf"{_WORD_UP}|{_WORD_DOWN}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + _TAIL
GPT4O = (
    rf"{_WORD_UP}{_CONTRACTIONS}?|{_WORD_DOWN}{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + _TAIL
)
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
CJK = "[一-龥\u0800-\u4e00가-\ud7ff]+"
DEEPSEEK3_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    + _TAIL
)


@dataclass(frozen=True)
class Splitting:
    """The parts of a tokenizer that come before the merges."""

    pre_tokenizer: Callable[[], Any]
    nfc: bool = False
    ignore_merges: bool = False  # a whole word in the vocabulary is taken as it is
    add_bos: bool = False  # unless the file says otherwise

    def normalizer(self) -> Any:
        """The `tokenizers` normalizer, or None."""
        return normalizers.NFC() if self.nfc else None


def _split(*patterns: str, digits: bool = False) -> Callable[[], Any]:
    """Splits at each pattern in turn, keeping what matched as pieces of its own; then bytes."""

    def build() -> Any:
        steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated", False) for pattern in patterns]
        if digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits_gpt2() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _falcon() -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            _gpt2(),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated", False),
        ]
    )


_GPT2 = Splitting(_gpt2)
_DIGITS = Splitting(_digits_gpt2)
_LLAMA3 = Splitting(_split(LLAMA3), ignore_merges=True, add_bos=True)
_QWEN2 = Splitting(_split(QWEN2), nfc=True)
_GPT4O = Splitting(_split(GPT4O))
_GLM4 = Splitting(_split(LLAMA3))
_BLOOM = Splitting(_split(BLOOM))
_BAILING = Splitting(_split(BAILING))
_DEEPSEEK3 = Splitting(_split(r"\p{N}{1,3}", DEEPSEEK3_CJK, DEEPSEEK3))

SPLITTINGS: dict[str, Splitting] = {
    **dict.fromkeys(["default", "gpt-2", "phi-2", "olmo", "jais", "trillion", "exaone4", "granite-docling"], _GPT2),
    **dict.fromkeys(["gigachat", "a.x-4.0", "mellum"], _GPT2),
    "mpt": Splitting(_gpt2, nfc=True),
    **dict.fromkeys(["smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"], _DIGITS),
    "command-r": Splitting(_digits_gpt2, nfc=True),
    "falcon": Splitting(_falcon),
    **dict.fromkeys(
        ["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"], _LLAMA3
    ),
    **dict.fromkeys(["glm4", "chatglm-bpe", "dbrx", "smaug-bpe"], _GLM4),
    **dict.fromkeys(["qwen2", "deepseek-r1-qwen", "megrez", "kormo"], _QWEN2),
    **dict.fromkeys(["stablelm2", "hunyuan", "solar-open", "grok-2"], Splitting(_split(QWEN2))),
    "qwen35": Splitting(_split(QWEN35), nfc=True),
    "seed-coder": Splitting(_split(SEED_CODER)),
    **dict.fromkeys(["bailingmoe", "bailingmoe2", "llada-moe"], _BAILING),
    "tekken": Splitting(_split(TEKKEN), ignore_merges=True, add_bos=True),
    **dict.fromkeys(["gpt-4o", "llama4", "kanana2", "minimax-m2"], _GPT4O),
    **dict.fromkeys(["bloom", "poro-chat", "gpt3-finnish"], _BLOOM),
    "viking": Splitting(_split(BLOOM, digits=True)),
    "deepseek-coder": Splitting(_split("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, digits=True)),
    **dict.fromkeys(["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"], _DEEPSEEK3),
}


def splitting(name: str) -> Splitting:
    """The splitting of a GGUF pre-tokenizer name. Raises StartupError, naming it, when it is not known."""
    found = SPLITTINGS.get(name)
    if found is None:
        raise StartupError(
            f"tokenizer.ggml.pre is {name!r}, which is none of {', '.join(sorted(SPLITTINGS))}: "
            "serve the model's Hugging Face folder instead of the GGUF file"
        )
    return found
