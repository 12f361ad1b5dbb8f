"""The fields that chat and text completions have in common, and the sampling parameters they make.

Every field may be null, which means the same as leaving it out.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shared.errors import RequestError
from shared.model_info import ModelInfo
from shared.sampling import SamplingParams

_RANDOM_SEED = -1  # what other engines call "no seed"


class StreamOptions(msgspec.Struct):
    """What a stream carries besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """A request for text. Types are strict: "16" is no integer."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def max_tokens_param(self) -> str:
        """The field that limits the output: `max_completion_tokens` wins over `max_tokens`."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def sampling_params(self, model: ModelInfo) -> SamplingParams:
        """The parameters, checked; `max_tokens` stays None when not given. Raises RequestError."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true.", param="stream_options")
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if limit is not None and limit < 1:
            param = self.max_tokens_param
            raise RequestError(f"{param} must be at least 1, got {limit}.", param=param)
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "n": self.n,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
            "stop_token_ids": self.stop_token_ids,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "skip_special_tokens": self.skip_special_tokens,
            "ignore_eos": self.ignore_eos,
            "min_tokens": self.min_tokens,
        }
        params = SamplingParams(max_tokens=limit, **{name: value for name, value in given.items() if value is not None})
        params.seed = None if self.seed == _RANDOM_SEED else self.seed
        params.validate(model.vocab_size)
        params.top_k = params.top_k if 0 < params.top_k < model.vocab_size else 0
        return params


def with_room(
    params: SamplingParams, prompt_tokens: int, model: ModelInfo, *, default: int | None, prompt: str, limit: str
) -> SamplingParams:
    """The parameters with `max_tokens` settled for a prompt of so many tokens. Raises RequestError.

    Not given: `default`, or less if the context leaves less. Given and more than the context leaves: an error, as with
    OpenAI, so that no client gets less than it asked for. `prompt` and `limit` name the fields.
    """
    longest = model.max_model_len
    room = longest - prompt_tokens
    if prompt_tokens == 0:
        raise RequestError(f"{prompt} is empty: it has no tokens.", param=prompt)
    if room < 1:
        more = "" if room else ", which leaves no room for output"
        raise RequestError(
            f"This model's maximum context length is {longest} tokens. However, your {prompt} resulted in "
            f"{prompt_tokens} tokens{more}. Please reduce the length of the {prompt}.",
            param=prompt,
            code="context_length_exceeded",
        )
    wanted = params.max_tokens
    if wanted is not None and wanted > room:
        raise RequestError(
            f"This model's maximum context length is {longest} tokens. However, you requested "
            f"{prompt_tokens + wanted} tokens ({prompt_tokens} in the {prompt}, {wanted} in the completion). "
            f"Please reduce the length of the {prompt} or {limit} to at most {room}.",
            param=limit,
            code="context_length_exceeded",
        )
    if wanted is None:
        wanted = room if default is None else min(default, room)
    settled = msgspec.structs.replace(params, max_tokens=wanted)
    settled.validate(model.vocab_size)
    return settled
