"""What is read of a model before it is loaded: length, ids that end a sequence, dtype, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.config import EngineConfig
from shared.errors import StartupError
from shared.model_config import ARCHITECTURES
from shared.model_info import ModelInfo, read_model_info
from tests.model_factory import KINDS, smollm2, tiny_model, to_gguf

Edit = Callable[..., Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: tiny_model(kind, root / kind) for kind in KINDS}


@pytest.fixture
def edit(models: dict[str, Path], tmp_path: Path) -> Edit:
    """A function that copies the tiny llama, with keys of one of its JSON files changed; ... takes a key away."""

    def make(file: str = "config.json", **changes: Any) -> Path:
        copy = tmp_path / "copy"
        if not copy.exists():
            shutil.copytree(models["llama"], copy)
        values = json.loads((copy / file).read_text()) | changes
        (copy / file).write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
        return copy

    return make


def info(path: Path, **flags: Any) -> ModelInfo:
    return read_model_info(EngineConfig(model=str(path), **flags))


def test_every_architecture(models: dict[str, Path]) -> None:
    found = {info(path).architecture for path in models.values()}
    assert found == ARCHITECTURES
    assert info(models["qwen3"]) == ModelInfo(
        path=str(models["qwen3"]),
        architecture="Qwen3ForCausalLM",
        vocab_size=512,
        max_model_len=2048,
        eos_token_ids=[2],
        dtype="float32",
        created=int(models["qwen3"].stat().st_mtime),
    )


def test_the_bundled_model() -> None:
    model = read_model_info(EngineConfig())
    assert model.path == str(smollm2())
    assert (model.architecture, model.vocab_size, model.max_model_len) == ("LlamaForCausalLM", 49152, 8192)
    assert (model.eos_token_ids, model.dtype) == ([2], "bfloat16")


def test_gguf_says_the_same_as_the_folder(models: dict[str, Path], tmp_path: Path) -> None:
    for kind in ("llama", "qwen2", "qwen3"):
        of_folder = info(models[kind])
        of_file = info(to_gguf(models[kind], tmp_path / f"{kind}.gguf"))
        expected = msgspec.structs.replace(of_folder, path=of_file.path, dtype="bfloat16", created=of_file.created)
        assert of_file == expected


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys; from shared.config import EngineConfig; from shared.model_info import read_model_info;"
        "read_model_info(EngineConfig()); print(sorted({'torch', 'transformers', 'numpy', 'gguf'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, 2048),
        ({"type": "linear", "factor": 2.0}, 4096),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024}, 2048),
        ({"rope_type": "yarn", "factor": 2.0}, 4096),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 2048),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_the_length_follows_the_rope_scaling(
    scaling: dict[str, Any] | None, expected: int, nested: bool, edit: Edit
) -> None:
    if nested:
        path = edit(rope_parameters={"rope_theta": 5000.0, **(scaling or {})})
    else:
        path = edit(rope_parameters=..., rope_theta=5000.0, rope_scaling=scaling)
    assert info(path).max_model_len == expected
    assert info(path, max_model_len=expected).max_model_len == expected
    with pytest.raises(StartupError, match=f"--max-model-len {expected + 1}: this model takes from 1 to {expected}"):
        info(path, max_model_len=expected + 1)


def test_dynamic_scaling_is_used_where_the_length_asks_for_it(edit: Edit) -> None:
    path = edit(rope_parameters={"rope_theta": 5000.0, "rope_type": "dynamic", "factor": 4.0})
    assert info(path, max_model_len=8192).max_model_len == 8192
    with pytest.raises(StartupError, match="8192"):
        info(path, max_model_len=8193)


@pytest.mark.parametrize("length", [0, -1, 10**9])
def test_an_absurd_length_is_refused_with_the_limit(length: int, models: dict[str, Path]) -> None:
    with pytest.raises(StartupError, match=f"--max-model-len {length}: .* 1 to 2048 tokens"):
        info(models["llama"], max_model_len=length)


def test_a_shorter_length_is_taken(models: dict[str, Path]) -> None:
    assert info(models["llama"], max_model_len=1).max_model_len == 1


@pytest.mark.parametrize(
    ("config", "generation", "token", "expected"),
    [
        (2, 2, "<|im_end|>", [2]),
        (0, [0, 2], "<|endoftext|>", [0, 2]),
        (0, ..., "<|im_end|>", [0, 2]),
        ([5, 7], 9, {"content": "<|im_end|>"}, [2, 5, 7, 9]),
        (None, None, None, []),
        (..., ..., "<|im_end|>", [2]),
        (0, 0, "unheard of", [0]),
    ],
)
def test_ends_of_all_files_count(config: Any, generation: Any, token: Any, expected: list[int], edit: Edit) -> None:
    edit(eos_token_id=config)
    edit("generation_config.json", eos_token_id=generation)
    assert info(edit("tokenizer_config.json", eos_token=token)).eos_token_ids == expected


def test_without_generation_and_tokenizer_files(edit: Edit) -> None:
    path = edit(eos_token_id=7)
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        (path / name).unlink()
    assert info(path).eos_token_ids == [7]


def test_the_older_table_of_special_tokens(edit: Edit) -> None:
    path = edit("tokenizer_config.json", added_tokens_decoder={"300": {"content": "<|im_end|>"}})
    (path / "tokenizer.json").unlink()
    assert info(path).eos_token_ids == [2, 300]


def test_gguf_end_of_turn(models: dict[str, Path], tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "turn.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in [("context_length", 64), ("embedding_length", 64), ("attention.head_count", 4)]:
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.vocab_size", 512)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(9)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert info(path).eos_token_ids == [2, 9]


@pytest.mark.parametrize(
    ("named", "flag", "expected"),
    [
        ({"dtype": "bfloat16"}, "auto", "bfloat16"),
        ({"dtype": ..., "torch_dtype": "float16"}, "auto", "float16"),
        ({"dtype": "float64"}, "auto", "float32"),
        ({"dtype": ...}, "auto", "float32"),  # as stored
        ({"dtype": "bfloat16"}, "float32", "float32"),
        ({"dtype": "fp8_e4m3"}, "float16", "float16"),
    ],
)
def test_dtype(named: dict[str, Any], flag: Any, expected: str, edit: Edit) -> None:
    assert info(edit(**named), dtype=flag).dtype == expected


def test_unnamed_dtype_is_the_stored_one(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path / "bf16", dtype="bfloat16")
    config = json.loads((path / "config.json").read_text())
    del config["dtype"]
    (path / "config.json").write_text(json.dumps(config))
    assert info(path).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported, only LlamaForCausalLM, Mistral"),
        ({"architectures": ...}, "not given is not supported"),
        ({"architectures": "LlamaForCausalLM"}, "not given is not supported"),
        ({"vocab_size": ...}, "vocab_size must be an integer of at least 1, got nothing"),
        ({"vocab_size": "many"}, "vocab_size must be an integer of at least 1, got 'many'"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be"),
        ({"rope_scaling": {"type": "longer", "factor": 2}}, "rope_scaling.type is 'longer', which is not supported"),
        ({"rope_scaling": {"rope_type": "su"}}, "rope_scaling.rope_type is 'su'"),
        ({"rope_parameters": {"rope_type": "x"}}, "rope_parameters.rope_type is 'x'"),
        ({"rope_scaling": [1]}, r"rope_scaling must be an object, got \[1\]"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor must be a number above 0, got nothing"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor must be a number"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "rope_scaling.factor must be a number"),
        ({"rope_scaling": {"type": ["linear"]}}, "rope_scaling.type is"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differs by layer type"),
        ({"rope_parameters": {"rope_theta": 1}}, "rope_theta must be above 1"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor must be at most 1"),
        ({"dtype": "int4"}, "dtype is 'int4'"),
        ({"eos_token_id": "2"}, "eos_token_id must be a token id"),
        ({"eos_token_id": [True]}, "eos_token_id must be a token id"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ],
)
def test_a_bad_config_is_one_clear_error(changes: dict[str, Any], message: str, edit: Edit) -> None:
    with pytest.raises(StartupError, match=message) as caught:
        info(edit(**changes))
    assert "config.json: " in str(caught.value)


def test_gguf_quantization_is_of_gguf_files(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"--quantization gguf: .* is not a GGUF file; choose int8, int4 or w8a8"):
        info(models["llama"], quantization="gguf")
    info(to_gguf(models["llama"], tmp_path / "x.gguf"), quantization="gguf")


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\xff"])
def test_unreadable_json_is_one_clear_error(text: str, edit: Edit) -> None:
    path = edit()
    (path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(StartupError, match=r"config\.json: (cannot be read as JSON|must hold a JSON object)"):
        info(path)


def test_a_missing_config_is_one_clear_error(edit: Edit) -> None:
    path = edit()
    (path / "config.json").unlink()
    with pytest.raises(StartupError, match=r"config\.json: missing"):
        info(path)


def test_an_unknown_gguf_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "bert.gguf", "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(StartupError, match="GGUF architecture bert is not supported, only llama, qwen2, qwen3"):
        info(tmp_path / "bert.gguf")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "llama.attention.head_count must be an integer of at least 1, got nothing"),
        ({"split.count": 3}, "one part of several"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.attention.head_count_kv": [1, 2]}, "head_count_kv differs by layer"),
        ({"llama.rope.scaling.type": "odd"}, "rope_type is 'odd'"),
    ],
)
def test_a_bad_gguf_is_one_clear_error(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "bad.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    if keys:
        for key in ("context_length", "embedding_length", "attention.head_count", "vocab_size"):
            writer.add_uint32(f"llama.{key}", 64)
    for key, value in keys.items():
        add = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}[type(value)]
        add(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(StartupError, match=message) as caught:
        info(path)
    assert str(path) in str(caught.value)
