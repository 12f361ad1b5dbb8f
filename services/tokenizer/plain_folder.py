"""Folders whose tokenizer is all in tokenizer.json: loaded without transformers, whose import takes over a second.

transformers takes tokenizer.json as it is only for its general class, and then changes it where tokenizer_config.json
says something else about tokens. Here everything must agree; whatever does not is left to transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

GENERAL_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
MODEL_TYPES = (None, "llama", "qwen3")  # those for which transformers believes what tokenizer_config.json says
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TOKEN_LISTS = ("extra_special_tokens", "additional_special_tokens")
WITHOUT_EFFECT = {  # on ids and text; the bos and eos switches are not read where there is a tokenizer.json
    "add_bos_token",
    "add_eos_token",
    "backend",
    "clean_up_tokenization_spaces",
    "is_local",
    "local_files_only",
    "model_input_names",
    "model_max_length",
    "padding_side",
    "tokenizer_class",
    "truncation_side",
}
KNOWN = {*WITHOUT_EFFECT, *NAMED_TOKENS, *TOKEN_LISTS, "added_tokens_decoder", "chat_template"}


@dataclass(frozen=True)
class PlainFolder:
    """A tokenizer as its folder has it."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]  # "bos_token": "<s>" ...
    chat_templates: dict[str, str]  # "default", and others by name


def read_plain_folder(path: Path) -> PlainFolder | None:
    """The folder's tokenizer; None where only transformers knows what it makes of the folder."""
    try:
        config = json.loads((path / "tokenizer_config.json").read_text("utf-8"))
        model_config = path / "config.json"
        model_type = json.loads(model_config.read_text("utf-8")).get("model_type") if model_config.exists() else None
        text = (path / "tokenizer.json").read_text("utf-8")
        if config.get("tokenizer_class") not in GENERAL_CLASSES or model_type not in MODEL_TYPES:
            return None
        added = json.loads(text)["added_tokens"]
        if not _agree(path, config, {token["content"]: token for token in added}):
            return None
        special = {name: _content(config[name]) for name in NAMED_TOKENS if config.get(name) is not None}
        return PlainFolder(Tokenizer.from_str(text), special, _chat_templates(path, config))
    except Exception:  # of files in any other shape: transformers says what is wrong with them
        return None


def _agree(path: Path, config: Mapping[str, Any], added: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether tokenizer_config.json has nothing to say about tokens that tokenizer.json does not say itself."""
    if not config.keys() <= KNOWN:
        return False
    decoder = config.get("added_tokens_decoder")
    if decoder is None:
        legacy = ("special_tokens_map.json", "added_tokens.json")  # read only then
        if any((path / name).exists() for name in legacy):
            return False
    elif any(added.get(token["content"]) != {**token, "id": int(id)} for id, token in decoder.items()):
        return False
    named = [config[name] for name in NAMED_TOKENS if config.get(name) is not None]
    lists = [token for name in TOKEN_LISTS for token in config.get(name) or []]
    if any(isinstance(config.get(name), dict) for name in TOKEN_LISTS):
        return False
    return all(_content(token) in added and added[_content(token)]["special"] for token in named + lists)


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Files go before the configuration, which holds one template or a list of named ones."""
    files = {file.stem: file for file in path.glob("additional_chat_templates/*.jinja")}
    if (path / "chat_template.jinja").exists():
        files["default"] = path / "chat_template.jinja"
    if files:
        return {name: file.read_text("utf-8") for name, file in files.items()}
    found = config.get("chat_template")
    if isinstance(found, list):
        return {each["name"]: each["template"] for each in found}
    return {} if found is None else {"default": found}
