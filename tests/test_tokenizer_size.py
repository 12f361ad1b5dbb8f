"""The tokenizer's size out of every shape of model, and what it does to sampling."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from services.worker import native
from services.worker.load import load
from shared.config import EngineConfig
from shared.messages import Admit, Plan, pack_ids
from shared.model_info import ModelInfo, read_model_info
from shared.sampling import SamplingParams
from shared.tokenizer_size import gguf_tokenizer_size, tokenizer_size
from tests.model_factory import VOCAB_SIZE, tiny_model, to_gguf

PADDED = VOCAB_SIZE + 88
BACKENDS = ["reference", *([] if native.unavailable() else ["cpu"])]


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits are highest beyond the tokenizer's ids."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tiny_model("llama", tmp_path_factory.mktemp("padded"), vocab_size=PADDED)
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    head[VOCAB_SIZE:] = head[torch.arange(PADDED - VOCAB_SIZE) % 64] * 8
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def written(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        path = folder / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(json.dumps(content))
    return folder


def sentencepiece(pieces: int) -> bytes:
    """A ModelProto: pieces, and other fields of every wire type between them."""
    piece = bytes([0x0A, 3]) + b"\x0a\x01a"
    others = bytes([0x10, 0x96, 0x01]) + bytes([0x19]) + struct.pack("<d", 1.0) + bytes([0x25]) + struct.pack("<f", 2.0)
    long = bytes([0x12]) + bytes([0x80, 0x02]) + bytes(256)
    return piece * (pieces - 1) + others + long + piece


BPE = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 7, "c": 3}, "merges": [["a", "b"]]}}


@pytest.mark.parametrize(
    ("files", "size"),
    [
        ({"tokenizer.json": BPE}, 8),
        ({"tokenizer.json": BPE | {"added_tokens": [{"id": 11, "content": "<s>"}, {"id": 2, "content": "x"}]}}, 12),
        ({"tokenizer.json": {"model": {"type": "Unigram", "vocab": [["a", -1.5], ["b", 0], ["c", -2]]}}}, 3),
        ({"tokenizer.json": BPE, "tokenizer_config.json": {"added_tokens_decoder": {"8": {"content": "x"}}}}, 9),
        ({"vocab.json": {"a": 0, "b": 4}}, 5),
        ({"vocab.json": {"a": 0}, "added_tokens.json": {"<s>": 6}}, 7),
        ({"vocab.json": {"a": 0}, "tokenizer_config.json": {"added_tokens_decoder": {"9": {"content": "x"}}}}, 10),
        ({"tokenizer.model": sentencepiece(5)}, 5),
        ({"tokenizer.model": sentencepiece(5), "added_tokens.json": {"<pad>": 5}}, 6),
        ({"tokenizer.model": sentencepiece(5)[:-2] + b"\xff"}, 5),
        ({"tokenizer.model": sentencepiece(5) + b"\xff"}, 0),
        ({"tokenizer.model": sentencepiece(5) + b"\x0f"}, 0),
        ({"tokenizer.json": {"model": 5}}, 0),
        ({"tokenizer.json": b"{"}, 0),
        ({"tokenizer_config.json": {}}, 0),
    ],
)
def test_folders(tmp_path: Path, files: dict[str, Any], size: int) -> None:
    assert tokenizer_size(written(tmp_path, files)) == size


@pytest.mark.parametrize(
    ("metadata", "size"),
    [
        ({"tokenizer.ggml.token_type": [3, 5, 1, 1, 5, 5], "tokenizer.ggml.tokens": list("abcdef")}, 4),
        ({"tokenizer.ggml.token_type": [5, 5]}, 0),
        ({"tokenizer.ggml.tokens": list("abcde")}, 5),
        ({"tokenizer.ggml.tokens": "abc"}, 0),
        ({}, 0),
    ],
)
def test_gguf_metadata(metadata: dict[str, Any], size: int) -> None:
    assert gguf_tokenizer_size(metadata) == size


def test_a_size_that_is_not_known_or_too_large_is_the_whole_vocabulary() -> None:
    def known(size: int) -> int:
        facts: dict[str, Any] = {"path": "", "architecture": "", "max_model_len": 1, "eos_token_ids": [], "dtype": ""}
        return ModelInfo(vocab_size=10, tokenizer_size=size, **facts).tokenizer_size

    assert [known(size) for size in (0, 1, 9, 10, 11)] == [10, 1, 9, 10, 10]


def test_a_padded_model_of_either_format(padded: Path, tmp_path: Path) -> None:
    for path in (padded, to_gguf(padded, tmp_path / "padded.gguf")):
        info = read_model_info(EngineConfig(model=str(path)))
        assert (info.vocab_size, info.tokenizer_size) == (PADDED, VOCAB_SIZE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_is_never_sampled(padded: Path, backend: Any) -> None:
    config = EngineConfig(model=str(padded), backend=backend, num_gpu_blocks_override=200, threads=1)
    info = read_model_info(config)
    ways = [SamplingParams(temperature=0.0)] + [SamplingParams(temperature=5.0, seed=seed) for seed in range(40)]

    def tokens(tokenizer_size: int) -> list[int]:
        info.tokenizer_size = tokenizer_size
        slots = list(range(len(ways)))
        admit = [Admit(slot, pack_ids([5, 6, 7]), 3, params) for slot, params in zip(slots, ways, strict=True)]
        count = [3] * len(slots)
        plan = Plan(1, 1, [], [], admit, slots, [0] * len(slots), count, [1] * len(slots), [[slot] for slot in slots])
        return load(config, info, lambda text: None).run(plan).tokens

    assert max(tokens(PADDED)) >= VOCAB_SIZE  # so they would be
    assert 0 <= min(tokens(VOCAB_SIZE)) <= max(tokens(VOCAB_SIZE)) < VOCAB_SIZE
