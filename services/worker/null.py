"""An engine without a model, for measuring and testing everything around it: it answers at once, or after a set time.

A slot's token at position p is a function of its first prompt token and p alone, so recoveries can be checked.
"""

from __future__ import annotations

import time

from services.worker.compute import Say
from shared.config import EngineConfig
from shared.messages import Plan, Result, unpack_ids
from shared.model_info import ModelInfo

NUM_BLOCKS = 65536


def null_token(first: int, position: int, vocab_size: int) -> int:
    """The token at `position` of a sequence that begins with `first`."""
    return (first * 31 + position * 7) % vocab_size


class NullEngine:
    """Keeps only each slot's first token. Never yields an EOS token."""

    backend = "null"
    arithmetic = "null"
    device = "none"
    block_bytes = 0

    def __init__(self, engine: EngineConfig, model: ModelInfo, say: Say, *, step_seconds: float = 0.0) -> None:
        """`step_seconds`: how long each step takes, asleep."""
        say("loading nothing")
        self._step_seconds = step_seconds
        self.num_blocks = engine.num_gpu_blocks_override or NUM_BLOCKS
        self._vocab_size = model.vocab_size
        self._eos = frozenset(model.eos_token_ids)
        self._first: dict[int, int] = {}

    def run(self, plan: Plan) -> Result:
        """The next token of each row that samples one."""
        for slot in plan.release:
            del self._first[slot]
        for admit in plan.admit:
            assert admit.slot not in self._first, f"slot {admit.slot} is taken"
            self._first[admit.slot] = unpack_ids(admit.tokens)[0]
        tokens = [
            self._token(self._first[slot], start + count)
            for slot, start, count, sampled in zip(plan.slots, plan.starts, plan.counts, plan.samples, strict=True)
            if sampled
        ]
        if self._step_seconds:
            time.sleep(self._step_seconds)
        return Result(plan.epoch, plan.step, tokens)

    def reset(self) -> None:
        """Clears all slots."""
        self._first.clear()

    def _token(self, first: int, position: int) -> int:
        token = null_token(first, position, self._vocab_size)
        while token in self._eos:
            token = (token + 1) % self._vocab_size
        return token
