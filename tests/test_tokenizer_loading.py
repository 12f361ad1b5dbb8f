"""Tokenizers load from both kinds of model files, without torch, and say clearly when they cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.tokenizer.loading import load
from shared.errors import StartupError
from tests.model_factory import smollm2, tiny_tokenizer

TEXTS = ["Once upon a time", "", " the  blocks\n", "你好🌶 <|im_start|>user"]

PROBE = """
import json, sys
from pathlib import Path
from services.tokenizer.loading import avoid_torch, load
from shared.errors import StartupError
from shared.messages import DecodeItem
avoid_torch()
texts = json.loads(sys.argv[1])
out = []
for path in sys.argv[2:]:
    try:
        codec = load(Path(path), 1000)
    except StartupError as error:
        out.append(str(error))
        continue
    ids = codec.encoder.encode(texts, True)
    out.append({
        "ids": ids,
        "strings": [codec.encoder.strings(each) for each in ids],
        "texts": [codec.decoder.decode(DecodeItem(b"", each, False, True)).text for each in ids],
        "beyond": codec.decoder.decode(DecodeItem(b"", [999])).text,
        "special": dict(codec.special_tokens),
        "templates": dict(codec.chat_templates),
    })
print(json.dumps([out, sys.modules.get("torch") is not None]))
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process without torch makes of several folders."""
    base = tmp_path_factory.mktemp("models")
    tiny_tokenizer().save_pretrained(base / "fast")
    limited = tiny_tokenizer()
    limited.backend_tokenizer.enable_truncation(2)
    limited.backend_tokenizer.enable_padding(length=9)
    limited.save_pretrained(base / "limited")
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(base / "slow")
    (base / "nothing").mkdir()
    (base / "broken").mkdir()
    (base / "broken" / "tokenizer.json").write_text("{")
    (base / "code").mkdir()
    (base / "code" / "evil.py").write_text("open('/nonexistent/ran', 'w')\nclass T: pass\n")
    (base / "code" / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.T", null]}}')
    names = ["fast", "limited", "slow", "nothing", "broken", "code"]
    paths = [str(base / name) for name in names]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(TEXTS), *paths], capture_output=True, text=True, check=True
    )
    results, torch = json.loads(done.stdout)
    assert done.stderr == ""
    return {**dict(zip(names, results, strict=True)), "torch": torch}


def test_torch_is_not_imported(loaded: dict[str, Any]) -> None:
    assert loaded["torch"] is False


def test_a_folder_gives_what_transformers_gives(loaded: dict[str, Any]) -> None:
    tokenizer = tiny_tokenizer()
    found = loaded["fast"]
    assert found["ids"] == [tokenizer.encode(text) for text in TEXTS]
    assert found["strings"] == [tokenizer.convert_ids_to_tokens(ids) for ids in found["ids"]]
    assert found["texts"] == TEXTS
    assert found["beyond"] == ""
    assert found["templates"] == {"default": tokenizer.chat_template}
    assert found["special"]["eos_token"] == "<|im_end|>"


def test_truncation_and_padding_in_the_file_are_off(loaded: dict[str, Any]) -> None:
    assert loaded["limited"]["ids"] == loaded["fast"]["ids"]


def test_a_tokenizer_written_in_python(loaded: dict[str, Any]) -> None:
    found = loaded["slow"]
    assert found["ids"][0] == [*(byte + 3 for byte in b"Once upon a time"), 1]
    assert found["texts"][0] == "Once upon a time</s>"
    assert found["texts"][3].startswith("你好🌶")


@pytest.mark.parametrize(
    ("name", "said"),
    [("nothing", "holds no tokenizer"), ("broken", "cannot be loaded"), ("code", "cannot be loaded")],
)
def test_what_cannot_load_is_one_line(loaded: dict[str, Any], name: str, said: str) -> None:
    assert f"{name}: " in loaded[name]
    assert said in loaded[name]
    assert "\n" not in loaded[name]


def test_a_gguf_file() -> None:
    codec = load(smollm2(), 50_000)
    assert codec.encoder.encode(["🌶", "}}", " world", ""], True) == [[10813, 230, 131], [17859], [905], []]
    assert codec.encoder.strings([905]) == ["Ġworld"]
    assert "default" in codec.chat_templates


def test_what_is_no_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(StartupError, match=r"model\.gguf"):
        load(path)
