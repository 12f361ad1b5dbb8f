"""Folders that are read without transformers give what transformers gives, and all others are left to it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from services.tokenizer.loading import load
from services.tokenizer.plain_folder import read_plain_folder
from shared.gguf_file import GGUFFile
from tests.model_factory import smollm2, tiny_tokenizer

TEXTS = [
    "Once upon a time",
    "",
    " the  blocks\n\n\t12345",
    "你好🌶 <|im_start|>user\n<|im_end|>",
    "<|im_start|> x<|endoftext|>",
]
Json = dict[str, Any]


def texts() -> list[str]:
    draw = random.Random(0)
    pieces = ["the", " block", "\n", "é", "🌶", "<|im_start|>", "<|im_end|>", " ", "  ", "1", "_", "\x00", "ア", "'ll"]
    return TEXTS + ["".join(draw.choices(pieces, k=draw.randint(1, 30))) for _ in range(300)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def assert_as_transformers(folder: Path) -> None:
    plain = read_plain_folder(folder)
    assert plain is not None
    expected = AutoTokenizer.from_pretrained(str(folder))
    backend = expected.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    plain.tokenizer.no_padding()
    plain.tokenizer.no_truncation()
    for special in (True, False):
        for text in texts():
            found = plain.tokenizer.encode(text, add_special_tokens=special).ids
            assert found == expected.encode(text, add_special_tokens=special), text
            assert plain.tokenizer.decode(found, skip_special_tokens=special) == backend.decode(
                found, skip_special_tokens=special
            )
    assert plain.tokenizer.get_vocab() == backend.get_vocab()
    assert plain.tokenizer.get_added_tokens_decoder() == backend.get_added_tokens_decoder()
    assert plain.special_tokens == expected.special_tokens_map
    template = expected.chat_template
    assert plain.chat_templates == (
        {} if template is None else {"default": template} if isinstance(template, str) else template
    )


def added_tokens(folder: Path) -> Json:
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    return {str(token.pop("id")): token for token in added}


def one_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    edit(folder, chat_template="{{ messages }}")


def named_templates(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    edit(folder, chat_template=[{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}])


def template_files(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools é")
    edit(folder, chat_template="not this one")


def a_post_processor(folder: Path) -> None:
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", pair="<|im_start|> $A $B", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def model_of(kind: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(json.dumps({"model_type": kind})) and None  # type: ignore[func-returns-value]


PLAIN: dict[str, Callable[[Path], None]] = {
    "as saved": lambda folder: None,
    "llama": model_of("llama"),
    "qwen3": model_of("qwen3"),
    "the older name": lambda folder: edit(folder, tokenizer_class="PreTrainedTokenizerFast"),
    "tokens listed again": lambda folder: edit(folder, added_tokens_decoder=added_tokens(folder)),
    "a token as an object": lambda folder: edit(
        folder, eos_token={"__type": "AddedToken", **added_tokens(folder)["2"]}, pad_token=None
    ),
    "more special tokens": lambda folder: edit(folder, additional_special_tokens=["<|im_start|>"]),
    "switches that are not read": lambda folder: edit(folder, add_bos_token=True, add_eos_token=True),
    "a post-processor": a_post_processor,
    "a post-processor and a switch": lambda folder: (a_post_processor(folder), edit(folder, add_bos_token=False))[0],
    "no template": lambda folder: (folder / "chat_template.jinja").unlink(),
    "one template": one_template,
    "named templates": named_templates,
    "template files": template_files,
}


@pytest.mark.parametrize("name", PLAIN)
def test_equals_transformers(name: str, folder: Path) -> None:
    PLAIN[name](folder)
    assert_as_transformers(folder)


def test_the_vocabulary_of_smollm2(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    from services.tokenizer.gguf_tokenizer import build

    with GGUFFile(smollm2()) as file:
        built = build(file.metadata)
    PreTrainedTokenizerFast(
        tokenizer_object=built.tokenizer, chat_template=built.chat_templates["default"], **built.special_tokens
    ).save_pretrained(tmp_path)
    assert_as_transformers(tmp_path)


def a_token_of_other_properties(folder: Path) -> None:
    tokens = added_tokens(folder)
    tokens["2"]["lstrip"] = True
    edit(folder, added_tokens_decoder=tokens)


LEFT: dict[str, Callable[[Path], None]] = {
    "a class of its own": lambda folder: edit(folder, tokenizer_class="Qwen2Tokenizer"),
    "no class": lambda folder: edit(folder, tokenizer_class=None),
    "code": lambda folder: edit(folder, auto_map={"AutoTokenizer": ["x.T", None]}),
    "a model type that transformers corrects": model_of("qwen2"),
    "mistral": model_of("mistral"),
    "a key that is not known": lambda folder: edit(folder, split_special_tokens=True),
    "a new token": lambda folder: edit(folder, eos_token="<|new|>"),
    "a new extra token": lambda folder: edit(folder, extra_special_tokens=["<|new|>"]),
    "named extra tokens": lambda folder: edit(folder, extra_special_tokens={"image_token": "<|im_start|>"}),
    "other properties": a_token_of_other_properties,
    "a legacy file": lambda folder: (folder / "special_tokens_map.json").write_text("{}") and None,  # type: ignore[func-returns-value]
    "no configuration": lambda folder: (folder / "tokenizer_config.json").unlink(),
    "no JSON": lambda folder: (folder / "tokenizer_config.json").write_text("[") and None,  # type: ignore[func-returns-value]
    "broken": lambda folder: (folder / "tokenizer.json").write_text("{}") and None,  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("name", LEFT)
def test_left_to_transformers(name: str, folder: Path) -> None:
    LEFT[name](folder)
    assert read_plain_folder(folder) is None


def test_a_new_token_is_still_served(folder: Path) -> None:
    edit(folder, eos_token="<|new|>")
    assert load(folder).encoder.encode(["a<|new|>"], True) == [
        AutoTokenizer.from_pretrained(str(folder)).encode("a<|new|>")
    ]


def test_what_is_loaded_serves_text(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    edit(tmp_path / "copy", split_special_tokens=False)  # by way of transformers
    plain, full = load(folder, 600), load(tmp_path / "copy", 600)
    assert plain.encoder.encode(TEXTS, True) == full.encoder.encode(TEXTS, True)
    assert plain.special_tokens == full.special_tokens
    assert plain.chat_templates == full.chat_templates
