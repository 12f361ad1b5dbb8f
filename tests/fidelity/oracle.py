"""transformers in float32 on the bundled model: what every answer is compared with."""

from __future__ import annotations

import functools
from typing import Any

from services.tokenizer.gguf_tokenizer import build
from shared.gguf_file import GGUFFile
from tests.model_factory import smollm2


@functools.cache
def smollm2_oracle() -> Any:
    """The transformers model, out of the GGUF file; loaded once per test run, as it takes half a minute."""
    import torch
    from transformers import AutoModelForCausalLM

    path = smollm2()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


@functools.cache
def smollm2_tokenizer() -> Any:
    """The `tokenizers.Tokenizer` of the bundled model."""
    with GGUFFile(smollm2()) as file:
        return build(file.metadata).tokenizer


def greedy_ids(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """The ids that greedy decoding adds to a prompt, without the one that ends it."""
    import torch

    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False, eos_token_id=2, pad_token_id=2
        )
    ids: list[int] = output[0, len(prompt) :].tolist()
    return ids[:-1] if ids[-1] == 2 else ids
