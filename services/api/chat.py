"""POST /v1/chat/completions: conversations.

Tools with tool_choice "none" are left out of the prompt: nothing here would catch a call the model wrote all the same.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from services.api.conversation import ChatMessage, chat_options, conversation
from services.api.endpoint import EncodePrompts, GenerationEndpoint
from services.api.errors import not_supported
from services.api.fields import GenerationRequest
from services.api.sse import CHAT_CHUNK
from shared.engine import Sample
from shared.errors import RequestError
from shared.model_info import ModelInfo


class ChatRequest(GenerationRequest, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None


class ChatEndpoint(GenerationEndpoint[ChatRequest]):
    """Chat completions."""

    decoder = msgspec.json.Decoder(ChatRequest)
    shape = CHAT_CHUNK
    object = "chat.completion"
    id_prefix = "chatcmpl-"
    prompt_param = "messages"
    default_max_tokens = None

    def prepare(self, request: ChatRequest, model: ModelInfo) -> EncodePrompts:
        if request.tools and request.tool_choice != "none":
            raise not_supported("tools", 'tools are not supported; leave them out or set tool_choice to "none".')
        if request.tool_choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools.", param="tool_choice")
        if request.functions:
            raise not_supported("functions")
        if request.function_call not in (None, "none", "auto"):
            raise RequestError("function_call needs functions.", param="function_call")
        messages = conversation(request.messages)
        options = chat_options(
            request, trust_template=self.gateway.config.trust_request_chat_template, with_tools=False
        )
        if request.reasoning_effort is not None:
            kwargs = {"reasoning_effort": request.reasoning_effort, **options.chat_template_kwargs}
            options.chat_template_kwargs = kwargs

        async def encode() -> list[array[int]]:
            return (await self.gateway.engine.encode_chat(messages, options)).ids

        return encode

    def choice(self, index: int, sample: Sample) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": sample.text, "refusal": None},
            "logprobs": None,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
