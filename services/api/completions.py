"""POST /v1/completions: one prompt or several, as text or as token ids."""

from __future__ import annotations

from array import array
from typing import Any, cast

import msgspec

from services.api.endpoint import EncodePrompts, GenerationEndpoint
from services.api.errors import not_supported
from services.api.fields import GenerationRequest
from services.api.sse import TEXT_CHUNK
from shared.engine import Sample
from shared.errors import RequestError
from shared.model_info import ModelInfo

MAX_CHOICES = 2048  # prompts times n


class CompletionRequest(GenerationRequest, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    best_of: int | None = None

    def prompts(self, vocab_size: int) -> tuple[list[str], list[array[int]]]:
        """The prompts as texts or as ids; the other list is empty. Raises RequestError."""
        prompt = self.prompt
        if prompt is None or prompt == []:
            raise RequestError("prompt is required: text, token ids, or a list of either.", param="prompt")
        if isinstance(prompt, str):
            return [prompt], []
        kinds = {type(item) for item in prompt}
        if kinds == {str}:
            return cast(list[str], prompt), []
        if kinds == {int}:
            return [], [_packed(cast(list[int], prompt), vocab_size, "prompt")]
        if kinds == {list}:
            lists = enumerate(cast(list[list[int]], prompt))
            return [], [_packed(ids, vocab_size, f"prompt[{index}]") for index, ids in lists]
        raise RequestError("prompt mixes texts, token ids and lists; send one kind.", param="prompt")


def _packed(ids: list[int], vocab_size: int, where: str) -> array[int]:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise RequestError(f"{where} must hold token ids from 0 to {vocab_size - 1}, got {wrong}.", param="prompt")
    return array("i", ids)


class CompletionEndpoint(GenerationEndpoint[CompletionRequest]):
    """Text completions."""

    decoder = msgspec.json.Decoder(CompletionRequest)
    shape = TEXT_CHUNK
    object = "text_completion"
    id_prefix = "cmpl-"
    prompt_param = "prompt"
    default_max_tokens = 16

    def prepare(self, request: CompletionRequest, model: ModelInfo) -> EncodePrompts:
        n = request.n or 1
        if request.best_of is not None and request.best_of != n:
            raise not_supported("best_of", f"best_of is not supported; leave it out, or send n ({n}).")
        texts, ids = request.prompts(model.vocab_size)
        if (count := len(texts or ids) * n) > MAX_CHOICES:
            raise RequestError(f"prompt times n must make at most {MAX_CHOICES} choices, got {count}.", param="prompt")
        special = request.add_special_tokens is not False

        async def encode() -> list[array[int]]:
            if not texts:
                return ids
            return (await self.gateway.engine.encode(texts, add_special_tokens=special)).ids

        return encode

    def choice(self, index: int, sample: Sample) -> dict[str, Any]:
        return {
            "index": index,
            "text": sample.text,
            "logprobs": None,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
