"""The baseline: transformers' own `generate`, one request at a time, on the prompts of a workload."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from bench.workloads import Shot
from shared.hub import resolve


def measure_transformers(weights: str, dtype: str, shots: Sequence[Shot]) -> dict[str, Any]:
    """Tokens per second over the prompts, after a short warm-up. Raises StartupError when there are no such weights."""
    import torch

    model = _load(weights, getattr(torch, dtype))

    def generate(prompt: list[int], count: int) -> int:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=count, max_new_tokens=count
        )
        return int(output.shape[1]) - len(prompt)

    with torch.inference_mode():
        generate(shots[0].prompt[:16], 2)
        start = time.perf_counter()
        tokens = sum(generate(shot.prompt, shot.output_tokens) for shot in shots)
        seconds = time.perf_counter() - start
    return {
        "name": "transformers",
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "requests": len(shots),
        "output_tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 2),
    }


def _load(weights: str, dtype: Any) -> Any:
    from transformers import AutoModelForCausalLM

    path = resolve(weights)
    where: dict[str, Any] = {} if path.is_dir() else {"gguf_file": path.name}
    model: Any = AutoModelForCausalLM.from_pretrained(path if path.is_dir() else path.parent, dtype=dtype, **where)
    return model.eval()
