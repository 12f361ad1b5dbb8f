"""Sampling parameters: one struct for the API, the bus and the offline class."""

from __future__ import annotations

import msgspec

from shared.errors import RequestError

MAX_STOPS = 4
SEED_MASK = (1 << 63) - 1


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """How to choose the next token, and when to stop.

    Temperature 0 is greedy; `top_k` 0 or -1 is off. `seed` None lets the api process draw one; sample i of n uses
    seed + i, so that every sample has a stream of its own.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True

    def validate(self, vocab_size: int) -> None:
        """Raises RequestError, naming the field, for a value out of range."""

        def need(ok: bool, param: str, what: str, value: object) -> None:
            if not ok:
                raise RequestError(f"{param} must be {what}, got {value}.", param=param)

        need(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        need(0.0 <= self.temperature <= 100.0, "temperature", "in [0, 100]", self.temperature)
        need(0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]", self.top_p)
        need(self.top_k >= -1, "top_k", "-1 or 0 (off), or positive", self.top_k)
        need(0.0 <= self.min_p <= 1.0, "min_p", "in [0, 1]", self.min_p)
        need(1 <= self.n <= 128, "n", "in [1, 128]", self.n)
        need(self.min_tokens >= 0, "min_tokens", "at least 0", self.min_tokens)
        need(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"at most max_tokens ({self.max_tokens})",
            self.min_tokens,
        )
        need(self.seed is None or -(1 << 63) <= self.seed < 1 << 64, "seed", "a 64-bit integer", self.seed)
        need(len(self.stop) <= MAX_STOPS, "stop", f"at most {MAX_STOPS} strings", len(self.stop))
        need(all(self.stop), "stop", "non-empty strings", '""')
        for token in self.stop_token_ids:
            need(0 <= token < vocab_size, "stop_token_ids", f"token ids below {vocab_size}", token)
