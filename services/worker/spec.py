"""A decoder as data: what the executors of every backend need to know to run a model family."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding, half-split ("neox") layout: pairs (i, i + dim / 2)."""

    dim: int  # rotated head dimensions, even, <= head_dim
    inv_freq: tuple[float, ...]  # [dim / 2], float32 values, scaling already applied
    attention_factor: float = 1.0  # multiplies cos and sin (yarn)


@dataclass(frozen=True)
class DecoderSpec:
    """A pre-norm, gated-MLP decoder: embedding, layers, final norm, head. All sizes in elements.

    Weights carry these canonical names (i = layer), each [out, in] as torch's Linear holds it:
    `embed`, `layers.i.{attn_norm,q,k,v,o,mlp_norm,gate,up,down}.weight`, with `.bias` for q, k, v where `qkv_bias`,
    o where `o_bias`, gate, up, down where `mlp_bias`, `layers.i.{q_norm,k_norm}.weight` [head_dim] where `qk_norm`,
    `final_norm.weight`, and `lm_head.weight` unless `tie_embeddings`. (`embed` is `embed.weight`, [vocab, hidden].)
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope: RopeSpec
    windows: tuple[int, ...]  # per layer: a token sees the last `window` tokens, itself included; 0 = all
    attention_scale: float  # head_dim ** -0.5 in most
    max_position: int  # tokens, as trained
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: str = "silu"
    attention_softcap: float = 0.0  # scores become tanh(score / cap) * cap; 0 = none. For Gemma 2, not loaded yet
    final_logit_softcap: float = 0.0  # likewise the logits

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name to shape of every weight of the model: what a loader must deliver, no more and no less."""
        h, hd, ff = self.hidden_size, self.head_dim, self.intermediate_size
        q, kv = self.num_heads * hd, self.num_kv_heads * hd
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab_size, h), "final_norm.weight": (h,)}
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, h)
        matrices = {
            "q": (q, h, self.qkv_bias),
            "k": (kv, h, self.qkv_bias),
            "v": (kv, h, self.qkv_bias),
            "o": (h, q, self.o_bias),
            "gate": (ff, h, self.mlp_bias),
            "up": (ff, h, self.mlp_bias),
            "down": (h, ff, self.mlp_bias),
        }
        for i in range(self.num_layers):
            for name, (rows, columns, bias) in matrices.items():
                shapes[f"layers.{i}.{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"layers.{i}.{name}.bias"] = (rows,)
            for norm in ("attn_norm", "mlp_norm"):
                shapes[f"layers.{i}.{norm}.weight"] = (h,)
            if self.qk_norm:
                for norm in ("q_norm", "k_norm"):
                    shapes[f"layers.{i}.{norm}.weight"] = (hd,)
        return shapes
