"""A model's configuration: config.json, or a GGUF file's metadata in the same words, read with every value checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.errors import StartupError
from shared.gguf_file import GGUFFile
from shared.tokenizer_size import gguf_tokenizer_size

ARCHITECTURES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""The model families that the worker can run; services/worker/models holds exactly these."""

GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "factors")  # factors: given per frequency, in GGUF
STRETCHING = ("linear", "dynamic", "yarn")  # kinds whose `factor` lengthens the context

GGUF_INTEGERS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
}
GGUF_EOS = ("eos_token_id", "eot_token_id", "eom_token_id")
GGUF_YARN = {
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


class ModelConfig:
    """The values of a config.json. Getters raise StartupError, naming file and key, for a missing or wrong value."""

    def __init__(
        self, values: Mapping[str, Any], source: str, prefix: str = "", words: Mapping[str, str] | None = None
    ) -> None:
        self.values = values
        self.source = source
        self._prefix = prefix
        self._words = words or {}  # what the file calls the keys, where it has other names for them

    def error(self, key: str, problem: str) -> StartupError:
        """The error to raise about `key`."""
        return StartupError(f"{self.source}: {self._prefix}{self._words.get(key, key)} {problem}")

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """An integer of at least `minimum`; absent or null gives the default, and an error where there is none."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(key, f"must be an integer of at least {minimum}, got {_shown(self.values, key)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero; absent or null gives the default, and an error where there is none."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.error(key, f"must be a number above 0, got {_shown(self.values, key)}")
        return value

    def boolean(self, key: str, default: bool = False) -> bool:
        """true or false; absent or null gives the default."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {_shown(self.values, key)}")
        return value

    def table(self, key: str) -> ModelConfig | None:
        """A nested object, or None where it is absent, null or empty."""
        value = self.values.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, got {_shown(self.values, key)}")
        return ModelConfig(value, self.source, f"{self._prefix}{key}.")

    @property
    def architecture(self) -> str:
        """The first of `architectures` that can be served. Raises StartupError, listing what can be, where none can."""
        named = self.values.get("architectures")
        names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
        for name in names:
            if name in ARCHITECTURES:
                return name
        known = ", ".join(sorted(ARCHITECTURES))
        raise StartupError(
            f"{self.source}: architecture {', '.join(names) or 'not given'} is not supported, only {known}"
        )

    @property
    def head_dim(self) -> int:
        """Elements of an attention head."""
        heads = self.integer("num_attention_heads")
        default = 128 if self.architecture == "Qwen3ForCausalLM" else self.integer("hidden_size") // heads
        return self.integer("head_dim", default)

    @property
    def max_position(self) -> int:
        """The longest context in tokens, as stretched by rope scaling (vLLM derives the same)."""
        length, rope = self.integer("max_position_embeddings"), self.rope()
        kind = rope.values["rope_type"]
        if kind not in STRETCHING:
            return length
        if kind == "yarn":
            length = rope.integer("original_max_position_embeddings")
        return int(length * rope.number("factor"))

    @property
    def default_length(self) -> int:
        """The context in tokens when none is asked for; with dynamic scaling the trained one."""
        dynamic = self.rope().values["rope_type"] == "dynamic"
        return self.integer("max_position_embeddings") if dynamic else self.max_position

    def rope(self) -> ModelConfig:
        """The rope parameters in transformers' newer layout, whichever layout the file has.

        Always holds `rope_type` (one of ROPE_KINDS) and `rope_theta`; yarn and llama3 hold the original length too.
        Older files call the kind `type`, keep theta at the top level and the rest in `rope_scaling`.
        """
        key = "rope_scaling" if self.table("rope_scaling") else "rope_parameters"
        table = self.table(key)
        values = dict(table.values) if table else {}
        rope = ModelConfig(values, self.source, f"{self._prefix}{key}.")
        kind_key = "rope_type" if values.get("rope_type") is not None else "type"
        kind = values.get(kind_key) or "default"
        if any(isinstance(value, dict) for value in values.values()):
            raise self.error(key, "differs by layer type, which is not supported")
        if kind not in ROPE_KINDS:
            raise rope.error(kind_key, f"is {kind!r}, which is not supported, only {', '.join(ROPE_KINDS[:-1])}")
        values["rope_type"] = kind
        values["rope_theta"] = rope.number("rope_theta", self.number("rope_theta", 10000.0))
        if values["rope_theta"] <= 1:
            raise self.error("rope_theta", f"must be above 1, got {values['rope_theta']}")
        partial = rope.number("partial_rotary_factor", self.number("partial_rotary_factor", 1.0))
        if partial > 1:
            raise self.error("partial_rotary_factor", f"must be at most 1, got {partial}")
        values["partial_rotary_factor"] = partial
        if kind in ("yarn", "llama3"):
            inner = rope.integer("original_max_position_embeddings", self.integer("max_position_embeddings"))
            values["original_max_position_embeddings"] = self.integer("original_max_position_embeddings", inner)
        if kind == "yarn" and values.get("factor") is None:
            values["factor"] = self.integer("max_position_embeddings") / values["original_max_position_embeddings"]
        return rope


def _shown(values: Mapping[str, Any], key: str) -> str:
    return "nothing" if values.get(key) is None else repr(values[key])[:60]


def is_gguf(path: Path) -> bool:
    """Whether the resolved model is a GGUF file rather than a folder."""
    return path.is_file()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises StartupError, naming the file, when it is missing, unreadable or none."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise StartupError(f"{path}: missing; a model folder holds config.json and .safetensors files") from None
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise StartupError(f"{path}: must hold a JSON object, not a {type(value).__name__}")
    return value


def read_config(path: Path) -> ModelConfig:
    """The configuration of the model at `path`, a folder or a GGUF file. Raises StartupError."""
    if is_gguf(path):
        with GGUFFile(path) as file:
            return gguf_config(file)
    source = path / "config.json"
    return ModelConfig(read_json(source), str(source))


def gguf_config(file: GGUFFile) -> ModelConfig:
    """A GGUF file's metadata as the config.json of the same model would put it. Raises StartupError."""
    meta = ModelConfig(file.metadata, str(file.path))
    name = str(file.metadata.get("general.architecture"))
    if name not in GGUF_ARCHITECTURES:
        known = ", ".join(sorted(GGUF_ARCHITECTURES))
        raise StartupError(f"{file.path}: GGUF architecture {name} is not supported, only {known}")
    if meta.integer("split.count", 1, minimum=0) > 1:
        raise StartupError(f"{file.path}: is one part of several; join them with `llama-gguf-split --merge`")
    if meta.integer(f"{name}.expert_count", 0, minimum=0):
        raise StartupError(f"{file.path}: mixtures of experts are not supported")
    words = {key: f"{name}.{word}" for key, word in GGUF_INTEGERS.items()}
    values: dict[str, Any] = {key: _uniform(meta, word) for key, word in words.items()}
    embedding = file.tensors.get("token_embd.weight")
    mistral = name == "llama" and values["sliding_window"]
    values |= {
        "architectures": ["MistralForCausalLM" if mistral else GGUF_ARCHITECTURES[name]],
        "vocab_size": embedding.shape[0] if embedding else file.metadata.get(f"{name}.vocab_size"),
        "tokenizer_size": gguf_tokenizer_size(file.metadata),
        "rms_norm_eps": file.metadata.get(f"{name}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "eos_token_id": _gguf_eos(meta),
        "use_sliding_window": bool(values["sliding_window"]),
        "max_window_layers": 0,
    }
    config = ModelConfig(values, str(file.path), words=words)
    values["rope_parameters"] = _gguf_rope(meta, f"{name}.rope.", config.head_dim, file.floats("rope_freqs.weight"))
    return config


def _gguf_eos(meta: ModelConfig) -> list[int]:
    """The ids that end a sequence or a turn."""
    keys = [f"tokenizer.ggml.{key}" for key in GGUF_EOS]
    return sorted({meta.integer(key, minimum=0) for key in keys if key in meta.values})


def _uniform(meta: ModelConfig, key: str) -> Any:
    value = meta.values.get(key)
    if not isinstance(value, list):
        return value
    if any(other != value[0] for other in value) or not value:
        raise meta.error(key, "differs by layer, which is not supported")
    return value[0]


def _gguf_rope(meta: ModelConfig, prefix: str, head_dim: int, factors: list[float] | None) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": meta.number(prefix + "freq_base", 10000.0)}
    rope["partial_rotary_factor"] = meta.integer(prefix + "dimension_count", head_dim) / head_dim
    if factors is not None:
        return rope | {"rope_type": "factors", "factors": factors}
    kind = meta.values.get(prefix + "scaling.type", "none")
    if kind == "none":
        return rope
    rope |= {"rope_type": kind, "factor": meta.values.get(prefix + "scaling.factor")}
    return rope | {key: meta.values.get(f"{prefix}scaling.{word}") for key, word in GGUF_YARN.items()}
