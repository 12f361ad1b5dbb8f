"""Rotary frequencies for every kind of rope scaling, as transformers computes them in float32.

Powers are rounded once, from float64; torch's own, which differ from CPU to CPU, are at times off by their last bit.

Sources: linear, https://kaiokendev.github.io/til; dynamic NTK, the same bases as transformers; yarn,
https://arxiv.org/abs/2309.00071; llama3, the reference code of Llama 3.1; factors, GGUF's `rope_freqs`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from services.worker.spec import RopeSpec
from shared.model_config import ModelConfig

Floats = NDArray[np.float32]


def rope_spec(config: ModelConfig, max_model_len: int) -> RopeSpec:
    """The rotary embedding that `config` asks for. Raises StartupError, naming the key, for what cannot be.

    Dynamic scaling is fixed for the whole server: the base that transformers would reach at `max_model_len` tokens,
    which is the plain one up to the trained length. A base that grew with each request would give a token other bytes
    in a long request than in a short one with the same beginning, and cached keys could not be shared.
    """
    rope = config.rope()
    dim = int(config.head_dim * rope.number("partial_rotary_factor"))
    if dim < 2 or dim % 2:
        raise config.error("head_dim", f"gives {dim} rotated dimensions, which must be an even number")
    kind, attention_factor = rope.values["rope_type"], 1.0
    plain = _plain(rope.number("rope_theta"), dim)
    if kind == "linear":
        plain /= rope.number("factor")
    elif kind == "dynamic":
        plain = _plain(_dynamic_base(config, rope, dim, max_model_len), dim)
    elif kind == "llama3":
        plain = _llama3(plain, rope)
    elif kind == "yarn":
        plain, attention_factor = _yarn(rope, dim), _yarn_attention(rope)
    elif kind == "factors":
        plain = _factors(plain, rope)
    return RopeSpec(dim, tuple(plain.tolist()), attention_factor)


def _powers(base: float, dim: int) -> Floats:
    """base ** (0, 2 / dim, 4 / dim, ...), [dim / 2]."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(float(np.float32(base)), exponents.astype(np.float64)).astype(np.float32)


def _plain(base: float, dim: int) -> Floats:
    return np.float32(1.0) / _powers(base, dim)


def _dynamic_base(config: ModelConfig, rope: ModelConfig, dim: int, max_model_len: int) -> float:
    trained = config.integer("max_position_embeddings")
    factor, length = rope.number("factor"), max(max_model_len, trained)
    if dim == 2:
        raise rope.error("rope_type", "cannot be dynamic with only 2 rotated dimensions")
    growth = factor * length / trained - (factor - 1)
    return float(rope.number("rope_theta") * growth ** (dim / (dim - 2)))


def _llama3(plain: Floats, rope: ModelConfig) -> Floats:
    factor, low, high = (rope.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = rope.integer("original_max_position_embeddings")
    if low >= high:
        raise rope.error("low_freq_factor", f"must be below high_freq_factor, got {low} and {high}")
    wavelength = 2 * math.pi / plain
    scaled = np.where(wavelength > trained / low, plain / factor, plain)
    smooth = (trained / wavelength - low) / (high - low)
    medium = ~(wavelength < trained / high) * ~(wavelength > trained / low)
    return np.where(medium, (1 - smooth) * scaled / factor + smooth * scaled, scaled)


def _yarn(rope: ModelConfig, dim: int) -> Floats:
    base, factor = rope.number("rope_theta"), rope.number("factor")
    trained = rope.integer("original_max_position_embeddings")

    def turning_dim(rotations: float) -> float:
        return (dim * math.log(trained / (rotations * 2 * math.pi))) / (2 * math.log(base))

    low, high = turning_dim(rope.number("beta_fast", 32)), turning_dim(rope.number("beta_slow", 1))
    if rope.boolean("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / width, 0, 1)
    powers = _powers(base, dim)
    keep = 1 - ramp
    return 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep


def _yarn_attention(rope: ModelConfig) -> float:
    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor")
    factor = rope.number("factor")

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        return mscale(rope.number("mscale")) / mscale(rope.number("mscale_all_dim"))
    return mscale(1.0)


def _factors(plain: Floats, rope: ModelConfig) -> Floats:
    factors = rope.values["factors"]
    if len(factors) != len(plain):
        raise rope.error("factors", f"holds {len(factors)} values, not {len(plain)}, one for each frequency")
    return plain / np.array(factors, dtype=np.float32)
