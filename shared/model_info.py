"""What every process needs to know of the served model; placeholder for the loader of `ModelInfo`."""

from __future__ import annotations

import msgspec


class ModelInfo(msgspec.Struct, kw_only=True):
    """Facts read from a model's files by the scheduler and sent to all in `Welcome`.

    `path` is a local folder or GGUF file (on the scheduler's host; a peer without it resolves `EngineConfig.model`).
    """

    path: str
    architecture: str  # e.g. "LlamaForCausalLM"
    vocab_size: int
    max_model_len: int  # tokens, prompt and output together, after --max-model-len
    eos_token_ids: list[int]
    dtype: str  # resolved: "float32", "bfloat16" or "float16"
    created: int = 0  # unix time
