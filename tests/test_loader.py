"""The loader against transformers, on the bundled GGUF and on tiny models written in every form."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.loader import weight_bytes, weight_formats, weights
from services.worker.models import HF_NAMES, checkpoint_names, decoder_spec
from services.worker.reference import as_tensor
from services.worker.spec import DecoderSpec
from shared.errors import StartupError
from shared.model_config import read_config
from tests.fidelity.oracle import smollm2_oracle
from tests.model_factory import KINDS, smollm2, tiny_model, to_gguf

Tensors = dict[str, torch.Tensor]
Edit = Callable[[Callable[[Tensors], None]], Path]

Q = "model.layers.0.self_attn.q_proj.weight"
EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def spec_of(path: Path) -> DecoderSpec:
    return decoder_spec(read_config(path), 2048)


def load(path: Path) -> Tensors:
    """The weights under Hugging Face's names, each exactly once."""
    spec = spec_of(path)
    pairs = [(name, as_tensor(weight)) for name, weight in weights(path, spec)]
    found = dict(pairs)
    assert len(pairs) == len(found)
    assert {name: tuple(weight.shape) for name, weight in pairs} == spec.weight_shapes()
    return {name: found[canonical] for name, canonical in checkpoint_names(found, HF_NAMES).items()}


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert torch.equal(weight.float(), expected[name].float()), name


def stored(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: tiny_model(kind, root / kind) for kind in KINDS} | {
        "tied": tiny_model("llama", root / "tied", tie_word_embeddings=True),
        "biased": tiny_model("llama", root / "biased", attention_bias=True, mlp_bias=True),
        "bfloat16": tiny_model("llama", root / "bfloat16", dtype="bfloat16"),
    }


@pytest.fixture
def edit(models: dict[str, Path], tmp_path: Path) -> Edit:
    """A function that copies the tiny llama with its tensors changed."""

    def make(change: Callable[[Tensors], None], kind: str = "llama") -> Path:
        copy = tmp_path / kind
        shutil.copytree(models[kind], copy)
        tensors = stored(copy)
        change(tensors)
        save_file({name: weight.clone() for name, weight in tensors.items()}, copy / "model.safetensors")
        return copy

    return make


@pytest.fixture(scope="module")
def transformers_smollm2() -> Tensors:
    return dict(smollm2_oracle().named_parameters())


def test_the_bundled_model_is_dequantised_as_transformers_does(transformers_smollm2: Tensors) -> None:
    assert_equal(load(smollm2()), transformers_smollm2)


@pytest.mark.parametrize("kind", [*KINDS, "tied", "biased", "bfloat16"])
def test_safetensors(kind: str, models: dict[str, Path]) -> None:
    found = load(models[kind])
    assert_equal(found, stored(models[kind]))
    assert {weight.dtype for weight in found.values()} == {torch.bfloat16 if kind == "bfloat16" else torch.float32}


def test_float64_arrives_as_float32(edit: Edit) -> None:
    path = edit(lambda tensors: tensors.update({Q: tensors[Q].double() / 3}))
    found = load(path)[Q]
    assert found.dtype == torch.float32
    assert torch.equal(found, stored(path)[Q].float())


def test_offsets_need_not_be_multiples(models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(models["llama"], tmp_path / "odd")
    file = tmp_path / "odd" / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    file.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    assert_equal(load(tmp_path / "odd"), stored(models["llama"]))


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "tied", "biased"])
def test_gguf_without_loss(kind: str, models: dict[str, Path], tmp_path: Path) -> None:
    assert_equal(load(to_gguf(models[kind], tmp_path / "x.gguf", "F32")), stored(models[kind]))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("quantization", "tolerance"),
    [("F16", 1e-3), ("BF16", 5e-3), ("Q8_0", 5e-3), ("Q5_0", 0.05), ("Q5_1", 0.05), ("Q4_0", 0.1), ("Q4_1", 0.1)],
)
def test_gguf_quantised(
    kind: str, quantization: str, tolerance: float, models: dict[str, Path], tmp_path: Path
) -> None:
    found = load(to_gguf(models[kind], tmp_path / "x.gguf", quantization))
    for name, expected in stored(models[kind]).items():
        assert (found[name].float() - expected).abs().max() <= tolerance * expected.abs().max(), name
    dtypes = {"F16": torch.float16, "BF16": torch.bfloat16}
    assert found[Q].dtype == dtypes.get(quantization, torch.float32)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_gguf_is_what_transformers_reads(kind: str, models: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    file = to_gguf(models[kind], tmp_path / "x.gguf", "Q8_0")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    assert_equal(load(file), dict(model.named_parameters()))


def test_shards_and_several_files(models: dict[str, Path], tmp_path: Path) -> None:
    expected = stored(models["qwen2"])
    copy = tmp_path / "copy"
    shutil.copytree(models["qwen2"], copy)
    (copy / "model.safetensors").unlink()
    names = list(expected)
    parts = {f"model-0000{i}-of-00003.safetensors": names[i::3] for i in range(3)}
    for file, part in parts.items():
        save_file({name: expected[name] for name in part}, copy / file)
    assert_equal(load(copy), expected)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"norm.weight": torch.zeros(64)}, copy / "consolidated.safetensors")  # not in the index
    assert_equal(load(copy), expected)
    (copy / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(StartupError, match=r"model-00001-of-00003\.safetensors: missing"):
        weights(copy, spec_of(copy))


def test_the_same_tensor_twice(edit: Edit) -> None:
    path = edit(lambda tensors: None)
    (path / "model.safetensors").rename(path / "a.safetensors")
    save_file({Q: torch.zeros(64, 64)}, path / "b.safetensors")
    with pytest.raises(StartupError, match=rf"b\.safetensors: tensor {Q} is also in a\.safetensors"):
        weights(path, spec_of(path))


def test_a_tied_head_may_be_there_twice(edit: Edit, models: dict[str, Path]) -> None:
    path = edit(lambda tensors: tensors.update({HEAD: tensors[EMBED]}), "tied")
    assert_equal(load(path), stored(models["tied"]))


def test_a_tied_head_of_its_own_is_refused(edit: Edit) -> None:
    path = edit(lambda tensors: tensors.update({HEAD: tensors[EMBED] + 1}), "tied")
    with pytest.raises(StartupError, match=f"{HEAD} differs from {EMBED}.*tie_word_embeddings"):
        load(path)


def test_a_gguf_without_a_head_is_tied(models: dict[str, Path], tmp_path: Path) -> None:
    assert HEAD not in load(to_gguf(models["tied"], tmp_path / "tied.gguf"))
    assert HEAD in load(to_gguf(models["llama"], tmp_path / "untied.gguf"))


def test_harmless_extras_are_left_aside(edit: Edit, models: dict[str, Path]) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    assert_equal(load(edit(lambda tensors: tensors.update(extra))), stored(models["llama"]))


def test_rope_factors_of_a_gguf_reach_the_spec(models: dict[str, Path], tmp_path: Path) -> None:
    factors = np.array([1, 1, 1, 1, 2, 4, 8, 8], dtype=np.float32)
    path = to_gguf(models["llama"], tmp_path / "x.gguf", extra={"rope_freqs.weight": factors})
    plain = spec_of(models["llama"]).rope
    expected = (np.array(plain.inv_freq, np.float32) / factors).tolist()
    assert list(spec_of(path).rope.inv_freq) == expected
    assert load(path).keys() == stored(models["llama"]).keys()


def drop(*names: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


K, V, NORM = (f"model.layers.1.{part}.weight" for part in ("self_attn.k_proj", "self_attn.v_proj", "input_layernorm"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop(HEAD), f"lacks 1 tensors, {HEAD} of a LlamaForCausalLM of 2 layers"),
        (drop(K, V, NORM, Q), r"lacks 4 tensors, .* and 1 more of a LlamaForCausalLM"),
        (lambda t: t.update({"model.x": torch.zeros(1)}), r"has 1 tensors, model\.x, unknown to a LlamaForCausalLM"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": t[Q]}), r"has 1 tensors, model\.layers\.2"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": t[NORM]}), r"has 1 tensors, .*q_proj\.bias"),
        (lambda t: t.update({Q: t[Q][:32]}), rf"{Q} has shape \[32, 64\], should be \[64, 64\]"),
        (lambda t: t.update({Q: t[Q].reshape(-1)}), rf"{Q} has shape \[4096\], should be \[64, 64\]"),
        (lambda t: t.update({Q: t[Q].to(torch.int8)}), f"{Q} is of type I8, not a float type"),
    ],
)
def test_what_does_not_match_is_named(change: Callable[[Tensors], None], message: str, edit: Edit) -> None:
    path = edit(change)
    with pytest.raises(StartupError, match=message) as caught:
        weights(path, spec_of(path))
    assert str(path) in str(caught.value)


def test_a_wrongly_shaped_tied_head_is_named(edit: Edit) -> None:
    path = edit(lambda tensors: tensors.update({HEAD: tensors[EMBED][:5]}), "tied")
    with pytest.raises(StartupError, match=rf"{HEAD} has shape \[5, 64\], should be \[512, 64\]"):
        weights(path, spec_of(path))


def test_a_gguf_that_does_not_match_is_named(models: dict[str, Path], tmp_path: Path) -> None:
    zeros = np.zeros(4, dtype=np.float32)
    path = to_gguf(models["llama"], tmp_path / "x.gguf", extra={"blk.0.attn_sinks.weight": zeros})
    with pytest.raises(StartupError, match=r"has 1 tensors, blk\.0\.attn_sinks\.weight, unknown"):
        weights(path, spec_of(path))
    with pytest.raises(StartupError, match=r"lacks 4 tensors, blk\.0\.attn_q_norm\.weight"):
        weights(path, dataclasses.replace(spec_of(path), qk_norm=True))


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_a_truncated_file_is_one_clear_error(keep: float, form: str, models: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(models["llama"], copy)
    spec = spec_of(copy)
    path = copy if form == "safetensors" else to_gguf(copy, tmp_path / "x.gguf")
    file = copy / "model.safetensors" if form == "safetensors" else path
    data = file.read_bytes()
    file.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(StartupError, match=file.name):
        list(weights(path, spec))


@pytest.mark.parametrize("kind", ["llama", "tied"])
def test_weight_bytes(kind: str, models: dict[str, Path]) -> None:
    elements = sum(weight.numel() for weight in stored(models[kind]).values())
    assert weight_bytes(spec_of(models[kind]), "float32") == 4 * elements
    assert weight_bytes(spec_of(models[kind]), "bfloat16") == 2 * elements


@pytest.mark.parametrize("quantization", ["int8", "int4", "w8a8"])
def test_weight_bytes_of_quantised_weights(quantization: str, models: dict[str, Path]) -> None:
    spec = spec_of(models["llama"])
    found = weight_bytes(spec, "bfloat16", weight_formats(models["llama"], spec, quantization))
    codes = {"int8": 1, "int4": 0.5, "w8a8": 1}[quantization]
    assert codes / 2 < found / weight_bytes(spec, "bfloat16") < codes
