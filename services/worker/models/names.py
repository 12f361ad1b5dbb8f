"""Tensor names: each canonical name of `DecoderSpec` in the words of a Hugging Face checkpoint and of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterable

HF_NAMES = {
    "embed": "model.embed_tokens",
    "layers.{}.attn_norm": "model.layers.{}.input_layernorm",
    "layers.{}.q": "model.layers.{}.self_attn.q_proj",
    "layers.{}.k": "model.layers.{}.self_attn.k_proj",
    "layers.{}.v": "model.layers.{}.self_attn.v_proj",
    "layers.{}.o": "model.layers.{}.self_attn.o_proj",
    "layers.{}.q_norm": "model.layers.{}.self_attn.q_norm",
    "layers.{}.k_norm": "model.layers.{}.self_attn.k_norm",
    "layers.{}.mlp_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.gate": "model.layers.{}.mlp.gate_proj",
    "layers.{}.up": "model.layers.{}.mlp.up_proj",
    "layers.{}.down": "model.layers.{}.mlp.down_proj",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
}

GGUF_NAMES = {
    "embed": "token_embd",
    "layers.{}.attn_norm": "blk.{}.attn_norm",
    "layers.{}.q": "blk.{}.attn_q",
    "layers.{}.k": "blk.{}.attn_k",
    "layers.{}.v": "blk.{}.attn_v",
    "layers.{}.o": "blk.{}.attn_output",
    "layers.{}.q_norm": "blk.{}.attn_q_norm",
    "layers.{}.k_norm": "blk.{}.attn_k_norm",
    "layers.{}.mlp_norm": "blk.{}.ffn_norm",
    "layers.{}.gate": "blk.{}.ffn_gate",
    "layers.{}.up": "blk.{}.ffn_up",
    "layers.{}.down": "blk.{}.ffn_down",
    "final_norm": "output_norm",
    "lm_head": "output",
}

HF_HARMLESS = ("rotary_emb.inv_freq",)  # endings: buffers of old transformers, computed from the config instead
GGUF_HARMLESS = ("rope_freqs.weight",)  # read with the metadata


def checkpoint_names(canonical: Iterable[str], table: dict[str, str]) -> dict[str, str]:
    """Maps the name in the checkpoint to the canonical one, for each of `canonical`."""
    return {_translate(name, table): name for name in canonical}


def _translate(name: str, table: dict[str, str]) -> str:
    stem, kind = name.rsplit(".", 1)  # kind: weight or bias
    head, _, rest = stem.partition(".")
    if head != "layers":
        return f"{table[stem]}.{kind}"
    layer, _, part = rest.partition(".")
    return f"{table[f'layers.{{}}.{part}'].format(layer)}.{kind}"
