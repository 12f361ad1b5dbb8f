"""When a sequence ends."""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.request import Sequence, Status
from shared.errors import RequestError


class Limits:
    """The stop conditions of one worker group: lengths in tokens, and the model's EOS ids."""

    def __init__(self, max_model_len: int, pool_tokens: int, eos_token_ids: Iterable[int]) -> None:
        self.max_model_len = max_model_len
        self.max_len = min(max_model_len, pool_tokens)  # of a sequence alone in the pool
        self._eos = frozenset(eos_token_ids)

    def apply(self, seq: Sequence) -> None:
        """Sets the sequence's own limits. Raises RequestError when its prompt leaves no room for an answer."""
        if seq.num_prompt >= self.max_len and not seq.num_output:
            raise RequestError(self._too_long(seq), param="prompt")
        most = seq.params.max_tokens
        seq.max_len = self.max_len if most is None else min(seq.num_prompt + most, self.max_len)
        stops = frozenset() if seq.params.ignore_eos else self._eos
        seq.stops = stops.union(seq.params.stop_token_ids) if seq.params.stop_token_ids else stops

    def _too_long(self, seq: Sequence) -> str:
        if self.max_len == self.max_model_len:
            return (
                f"The prompt has {seq.num_prompt} tokens; the model takes at most {self.max_len - 1}, so as to answer."
            )
        return (
            f"The prompt has {seq.num_prompt} tokens; the KV cache holds at most {self.max_len - 1} and an answer. "
            "Shorten the prompt, or give the server more KV cache memory."
        )

    def end_of(self, seq: Sequence) -> Status | None:
        """How the sequence ends with its last token; None if it goes on."""
        if seq.tokens[-1] in seq.stops and seq.num_output >= seq.params.min_tokens:
            return Status.FINISHED_STOPPED
        return Status.FINISHED_LENGTH if len(seq.tokens) >= seq.max_len else None

    def stop_token(self, seq: Sequence) -> int:
        """What to report as the token that stopped the sequence: not the EOS; -1 for none."""
        token = seq.tokens[-1]
        is_eos = token in self._eos and not seq.params.ignore_eos
        return token if seq.status == Status.FINISHED_STOPPED and not is_eos else -1
