"""torch tensors as the arrays that executors take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from services.worker.executor import Weight


def as_weight(tensor: torch.Tensor) -> Weight:
    """The same values: float32, float16, or the bits of bfloat16s as uint16. Without a copy where possible."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
    return tensor.contiguous().numpy()


def as_weights(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, Weight]]:
    """Name and values of each."""
    for name, tensor in tensors.items():
        yield name, as_weight(tensor)
