"""Specs of the families against transformers: rope frequencies, windows, names and shapes of weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from services.worker.models import FAMILIES, HF_NAMES, checkpoint_names, decoder_spec
from services.worker.spec import DecoderSpec, RopeSpec
from shared.errors import StartupError
from shared.model_config import ARCHITECTURES, ModelConfig
from tests.model_factory import KINDS, SMALL, VOCAB_SIZE

BASE: dict[str, Any] = {"vocab_size": VOCAB_SIZE, **SMALL}
LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], **BASE}


def spec(values: dict[str, Any], max_model_len: int = 2048) -> DecoderSpec:
    return decoder_spec(ModelConfig(values, "config.json"), max_model_len)


def hf_config(kind: str, **values: Any) -> Any:
    return getattr(transformers, f"{KINDS[kind]}Config")(**{**BASE, **values})


def spec_of(kind: str, **values: Any) -> DecoderSpec:
    """The spec of what transformers would save."""
    return spec(hf_config(kind, **values).to_dict() | {"architectures": [f"{KINDS[kind]}ForCausalLM"]})


def test_the_families_are_the_known_architectures() -> None:
    assert FAMILIES.keys() == ARCHITECTURES


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 2.5, "partial_rotary_factor": 0.5},
    {"rope_type": "dynamic", "factor": 2.0},
    YARN,
    {**YARN, "factor": None},
    {**YARN, "attention_factor": 0.7},
    {**YARN, "mscale": 0.8, "mscale_all_dim": 1.2},
    {**YARN, "mscale": 0.8},
    {**YARN, "truncate": False},
    {**YARN, "beta_fast": 20, "beta_slow": 2.5},
    {**YARN, "factor": 1.0},
    {"rope_type": "yarn", "factor": 2.0},
    {**LLAMA3, "original_max_position_embeddings": 512},
    LLAMA3,
]


def assert_frequencies(found: RopeSpec, expected: torch.Tensor) -> None:
    """Equal but for the last bits: torch rounds powers less well."""
    assert all(float(np.float32(value)) == value for value in found.inv_freq)
    np.testing.assert_array_max_ulp(np.array(found.inv_freq, np.float32), expected.numpy(), maxulp=3)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize(("head_dim", "theta"), [(16, 10000.0), (64, 100000.0), (128, 500000.0)])
def test_rope_is_transformers(scaling: dict[str, Any], head_dim: int, theta: float) -> None:
    config = hf_config("llama", head_dim=head_dim, rope_parameters={**scaling, "rope_theta": theta})
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
    nested = spec({**LLAMA, "head_dim": head_dim, "rope_parameters": {**scaling, "rope_theta": theta}})
    renamed = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
    old = spec({**LLAMA, "head_dim": head_dim, "rope_theta": theta, "rope_scaling": renamed})
    for found in (nested.rope, old.rope):
        assert found.dim == 2 * len(frequencies)
        assert_frequencies(found, frequencies)
        assert found.attention_factor == attention_factor


@pytest.mark.parametrize("values", [{}, {"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5}}])
def test_plain_rope_is_transformers(values: dict[str, Any]) -> None:
    frequencies = LlamaRotaryEmbedding(hf_config("llama", **values)).inv_freq
    found = spec({**LLAMA, **values}).rope
    assert_frequencies(found, frequencies)
    assert found.attention_factor == 1.0


def test_plain_rope_may_rotate_a_part() -> None:
    found = spec({**LLAMA, "partial_rotary_factor": 0.5}).rope
    assert found == spec({**LLAMA, "head_dim": 8}).rope
    assert found.dim == 8


@pytest.mark.parametrize("length", [100, 2048, 2049, 3000, 8192])
def test_dynamic_rope_is_fixed_at_the_servers_length(length: int) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](hf_config("llama", rope_parameters=rope), seq_len=length)
    found = spec({**LLAMA, "rope_parameters": rope}, length).rope
    assert_frequencies(found, expected)
    assert (found == spec(LLAMA).rope) == (length <= 2048)


def test_the_original_length_may_stand_beside_the_scaling() -> None:
    inside = spec({**LLAMA, "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 512}})
    beside = spec({**LLAMA, "rope_parameters": LLAMA3, "original_max_position_embeddings": 512})
    assert inside.rope == beside.rope != spec({**LLAMA, "rope_parameters": LLAMA3}).rope


def test_ggufs_frequency_factors() -> None:
    factors = [1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 8.0, 8.0]
    found = spec({**LLAMA, "rope_parameters": {"rope_type": "factors", "factors": factors}}).rope
    plain = spec(LLAMA).rope
    assert found.inv_freq == tuple(f / factor for f, factor in zip(plain.inv_freq, factors, strict=True))
    with pytest.raises(StartupError, match=r"rope_parameters\.factors holds 1 values, not 8"):
        spec({**LLAMA, "rope_parameters": {"rope_type": "factors", "factors": [1.0]}})


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("llama", {"sliding_window": 64}, (0, 0, 0, 0)),
        ("mistral", {"sliding_window": 64}, (64, 64, 64, 64)),
        ("mistral", {"sliding_window": None}, (0, 0, 0, 0)),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}, (0, 0, 0, 0)),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}, (64, 64, 64, 64)),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}, (0, 0, 0, 64)),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True}, (0, 0, 0, 0)),
        ("qwen2", {"sliding_window": None, "use_sliding_window": True}, (0, 0, 0, 0)),
        (
            "qwen3",
            {
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (9, 0, 9, 0),
        ),
    ],
)
def test_windows(kind: str, values: dict[str, Any], expected: tuple[int, ...]) -> None:
    architecture = {"architectures": [f"{KINDS[kind]}ForCausalLM"]}
    assert spec({**LLAMA, **architecture, "num_hidden_layers": 4, **values}).windows == expected
    assert spec_of(kind, num_hidden_layers=4, **values).windows == expected


def test_a_window_left_out_is_transformers_default() -> None:
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"]}
    assert spec(mistral).windows == (transformers.MistralConfig().sliding_window,) * 2


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", {"head_dim": 32, "num_key_value_heads": 1}),
        ("mistral", {"num_key_value_heads": 4}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 8}),
        ("qwen3", {"attention_bias": True, "num_hidden_layers": 3}),
    ],
)
def test_weights_are_the_models_own(kind: str, values: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = getattr(transformers, f"{KINDS[kind]}ForCausalLM")(hf_config(kind, **values))
    theirs = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    shapes = spec_of(kind, **values).weight_shapes()
    ours = {name: shapes[canonical] for name, canonical in checkpoint_names(shapes, HF_NAMES).items()}
    assert ours == theirs


def test_numbers_of_the_spec() -> None:
    found = spec({**LLAMA, "rms_norm_eps": 1e-5, "num_key_value_heads": None, "head_dim": None})
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (4, 4, 16)
    assert (found.norm_eps, found.attention_scale, found.max_position, found.activation) == (1e-5, 0.25, 2048, "silu")
    qwen3 = {key: value for key, value in LLAMA.items() if key != "head_dim"} | {"architectures": ["Qwen3ForCausalLM"]}
    assert spec(qwen3).head_dim == transformers.Qwen3Config().head_dim


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_attention_heads is 4, not a multiple of num_key"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', which is not supported, only silu"),
        ({"hidden_size": 0}, "hidden_size must be an integer of at least 1, got 0"),
        ({"attention_bias": "no"}, "attention_bias must be true or false"),
        ({"head_dim": 15}, "head_dim gives 15 rotated dimensions, which must be an even number"),
        ({"partial_rotary_factor": 0.01}, "head_dim gives 0 rotated dimensions"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "rope_scaling.low_freq_factor must be a number above 0"),
        (
            {"rope_scaling": {**LLAMA3, "low_freq_factor": 5}},
            "rope_scaling.low_freq_factor must be below high_freq_factor",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}, "head_dim": 2}, "rope_scaling.rope_type cannot be dynamic"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "rope_scaling.truncate must be true or false"),
    ],
)
def test_a_bad_config_is_one_clear_error(values: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=f"config.json: {message}"):
        spec({**LLAMA, **values})


@pytest.mark.parametrize("types", [["full_attention"], ["full_attention", "chunked_attention"], "full", [["x"], "y"]])
def test_bad_layer_types_are_one_clear_error(types: Any) -> None:
    values = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": types}
    with pytest.raises(StartupError, match=r"config\.json: layer_types"):
        spec({**LLAMA, **values})
