"""The families: what a config.json of each architecture means, one row each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.worker.models.rope import rope_spec
from services.worker.spec import DecoderSpec
from shared.model_config import ModelConfig

ACTIVATIONS = {"silu": "silu", "swish": "silu"}
DEFAULT_WINDOW = 4096  # transformers', for a config.json that leaves the key out; null means none


@dataclass(frozen=True)
class Family:
    """How an architecture differs from the plain decoder. A string names the config key that decides."""

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window: Literal["none", "all layers", "by layer"] = "none"


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "MistralForCausalLM": Family(window="all layers"),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window="by layer"),
    "Qwen3ForCausalLM": Family(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True, window="by layer"),
}


def decoder_spec(config: ModelConfig, max_model_len: int) -> DecoderSpec:
    """The decoder that `config` describes, for a server of `max_model_len` tokens. Raises StartupError."""
    family = FAMILIES[config.architecture]
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.error("num_attention_heads", f"is {heads}, not a multiple of num_key_value_heads, {kv_heads}")
    activation = str(config.values.get("hidden_act", "silu"))
    if activation not in ACTIVATIONS:
        raise config.error("hidden_act", f"is {activation!r}, which is not supported, only silu")

    def flag(value: bool | str) -> bool:
        return config.boolean(value) if isinstance(value, str) else value

    return DecoderSpec(
        architecture=config.architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.integer("intermediate_size"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope_spec(config, max_model_len),
        windows=windows(family, config),
        attention_scale=config.head_dim**-0.5,
        max_position=config.max_position,
        tie_embeddings=config.boolean("tie_word_embeddings"),
        qkv_bias=flag(family.qkv_bias),
        o_bias=flag(family.o_bias),
        mlp_bias=flag(family.mlp_bias),
        qk_norm=family.qk_norm,
        activation=ACTIVATIONS[activation],
    )


def windows(family: Family, config: ModelConfig) -> tuple[int, ...]:
    """The sliding window of each layer in tokens, 0 for none, as transformers masks them."""
    layers = config.integer("num_hidden_layers")
    used = {"none": False, "all layers": True, "by layer": config.boolean("use_sliding_window")}[family.window]
    if not used or config.values.get("sliding_window", DEFAULT_WINDOW) is None:
        return (0,) * layers
    window = config.integer("sliding_window", DEFAULT_WINDOW)
    if family.window == "all layers":
        return (window,) * layers
    types = config.values.get("layer_types")
    if types is None:
        first = config.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else 0 for layer in range(layers))
    if not isinstance(types, list) or len(types) != layers:
        raise config.error("layer_types", f"must be a list of {layers} entries, one for each layer")
    known = {"full_attention": 0, "sliding_attention": window}
    for kind in map(str, types):
        if kind not in known:
            raise config.error("layer_types", f"holds {kind!r}, which is not supported, only {', '.join(known)}")
    return tuple(known[kind] for kind in types)
