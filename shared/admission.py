"""What a request is checked for before it enters the engine, and the errors with which it can be turned away."""

from __future__ import annotations

from array import array

import msgspec

from shared.errors import RequestError
from shared.model_info import ModelInfo
from shared.sampling import SamplingParams

RETRY_SECONDS = 1  # told to clients that are refused


def checked(prompt: array[int], params: SamplingParams, cache_salt: str, model: ModelInfo) -> SamplingParams:
    """The parameters for the scheduler. Stop strings stay behind: they are matched on text, in this process."""
    room = model.max_model_len - len(prompt)
    if not prompt:
        raise RequestError("The prompt is empty.", param="prompt")
    if room < 1:
        raise RequestError(
            f"This model's maximum context length is {model.max_model_len} tokens, and the prompt has {len(prompt)}; "
            f"it may have {model.max_model_len - 1} at most.",
            param="prompt",
            code="context_length_exceeded",
        )
    if min(prompt) < 0 or max(prompt) >= model.vocab_size:
        raise RequestError(f"prompt token ids must be in [0, {model.vocab_size}).", param="prompt")
    params.validate(model.vocab_size)
    for stop in params.stop:
        check_unicode(stop, "stop")
    check_unicode(cache_salt, "cache_salt")
    return msgspec.structs.replace(params, stop=[], max_tokens=params.max_tokens or room)


def check_unicode(text: str, param: str) -> None:
    """Raises RequestError for a lone surrogate, which no message can carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{param} must be valid Unicode: {error.reason}.", param=param) from None


def overloaded(message: str) -> RequestError:
    """No room now; the client may try again."""
    return RequestError(message, status=503, kind="server_error", retry_after=RETRY_SECONDS)


def failed(message: str) -> RequestError:
    """The engine gave the request up."""
    return RequestError(message or "The engine failed.", status=500, kind="server_error")
