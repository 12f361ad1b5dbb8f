"""A `DecoderSpec` by the book: float64, one sequence, no cache, every step written out. Slow, and easy to check."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.worker.spec import DecoderSpec, RopeSpec

Array = NDArray[np.float64]


def make_spec(**fields: object) -> DecoderSpec:
    """A small spec, of which `fields` replaces some; `rope` is made to fit."""
    base: dict[str, object] = {
        "architecture": "Test",
        "vocab_size": 97,
        "hidden_size": 24,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 40,
        "norm_eps": 1e-5,
        "windows": (0, 0),
        "attention_scale": 8**-0.5,
        "max_position": 512,
        **fields,
    }
    dim = int(base.pop("rope_dim", base["head_dim"]))  # type: ignore[call-overload]
    inv_freq = tuple(float(np.float32(100.0 ** (-2 * i / dim))) for i in range(dim // 2))
    factor = float(base.pop("attention_factor", 1.0))  # type: ignore[arg-type]
    return DecoderSpec(rope=RopeSpec(dim, inv_freq, factor), **base)  # type: ignore[arg-type]


def make_weights(spec: DecoderSpec, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random float32 weights; norms near 1, and large enough elsewhere that every part of the model shows."""
    generator = np.random.default_rng(seed)
    weights = {}
    for name, shape in spec.weight_shapes().items():
        noise = generator.standard_normal(shape, np.float32)
        weights[name] = 1 + 0.3 * noise if "norm" in name else noise * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)
    return weights


def dense_logits(spec: DecoderSpec, weights: dict[str, NDArray[np.float32]], ids: list[int]) -> Array:
    """Logits after each of `ids`, [len(ids), vocab]."""
    w = {name: weight.astype(np.float64) for name, weight in weights.items()}
    x = w["embed.weight"][ids]
    for i, window in enumerate(spec.windows):
        layer = {name.removeprefix(f"layers.{i}."): v for name, v in w.items() if name.startswith(f"layers.{i}.")}
        x = x + _attention(spec, layer, _norm(spec, x, layer["attn_norm.weight"]), window)
        h = _norm(spec, x, layer["mlp_norm.weight"])
        gate = _linear(layer, "gate", h)
        x = x + _linear(layer, "down", gate / (1 + np.exp(-gate)) * _linear(layer, "up", h))
    head = w["embed.weight"] if spec.tie_embeddings else w["lm_head.weight"]
    logits: Array = _capped(_norm(spec, x, w["final_norm.weight"]) @ head.T, spec.final_logit_softcap)
    return logits


def _attention(spec: DecoderSpec, layer: dict[str, Array], x: Array, window: int) -> Array:
    q = _linear(layer, "q", x).reshape(len(x), spec.num_heads, spec.head_dim)
    k = _linear(layer, "k", x).reshape(len(x), spec.num_kv_heads, spec.head_dim)
    v = _linear(layer, "v", x).reshape(len(x), spec.num_kv_heads, spec.head_dim)
    if spec.qk_norm:
        q, k = _norm(spec, q, layer["q_norm.weight"]), _norm(spec, k, layer["k_norm.weight"])
    q, k = _rotate(spec, q), _rotate(spec, k)
    out = np.zeros_like(q)
    for t in range(len(x)):
        first = max(0, t + 1 - window) if window else 0
        for h in range(spec.num_heads):
            kv = h // (spec.num_heads // spec.num_kv_heads)
            scores = _capped(k[first : t + 1, kv] @ q[t, h] * spec.attention_scale, spec.attention_softcap)
            shares = np.exp(scores - scores.max())
            out[t, h] = shares / shares.sum() @ v[first : t + 1, kv]
    return _linear(layer, "o", out.reshape(len(x), -1))


def _capped(x: Array, cap: float) -> Array:
    return np.tanh(x / cap) * cap if cap else x


def _rotate(spec: DecoderSpec, x: Array) -> Array:
    out = x.copy()
    half = spec.rope.dim // 2
    for t in range(len(x)):
        for j, frequency in enumerate(spec.rope.inv_freq):
            turn = complex(np.cos(t * frequency), np.sin(t * frequency)) * spec.rope.attention_factor
            pair = (x[t, :, j] + 1j * x[t, :, j + half]) * turn
            out[t, :, j], out[t, :, j + half] = pair.real, pair.imag
    return out


def _norm(spec: DecoderSpec, x: Array, weight: Array) -> Array:
    normed: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.norm_eps) * weight
    return normed


def _linear(layer: dict[str, Array], name: str, x: Array) -> Array:
    out: Array = x @ layer[f"{name}.weight"].T + layer.get(f"{name}.bias", np.float64(0))
    return out
