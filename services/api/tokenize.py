"""POST /tokenize and /detokenize, also under /v1: text or a conversation to token ids, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.api.body import parse, read_body
from services.api.conversation import ChatMessage, chat_options, conversation
from services.api.exchange import run_while_connected
from services.api.gateway import Gateway
from shared.errors import RequestError

RequestType = TypeVar("RequestType", bound="ModelRequest")


class ModelRequest(msgspec.Struct, kw_only=True):
    """A request that may name the model."""

    model: str | None = None


class TokenizeRequest(ModelRequest, kw_only=True):
    """Text in `prompt`, or a conversation in `messages`."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(ModelRequest, kw_only=True):
    """Token ids to be turned into text, special tokens included."""

    tokens: list[int] | None = None


class _TextEndpoint(ABC, Generic[RequestType]):
    """An ASGI app for a POST route that needs a tokenizer, but no worker."""

    decoder: msgspec.json.Decoder[RequestType]

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    @abstractmethod
    async def answer(self, request: RequestType) -> dict[str, Any]:
        """The reply's JSON. Raises RequestError."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self.gateway.config.max_body_bytes)
        request = parse(self.decoder, body)
        self.gateway.model_name(request.model)
        with self.gateway.admitted():
            reply = await run_while_connected(self.answer(request), receive, self.gateway.closing)
        await Response(msgspec.json.encode(reply), media_type="application/json")(scope, receive, send)


class TokenizeEndpoint(_TextEndpoint[TokenizeRequest]):
    """Text or a conversation to token ids."""

    decoder = msgspec.json.Decoder(TokenizeRequest)

    async def answer(self, request: TokenizeRequest) -> dict[str, Any]:
        engine, strings = self.gateway.engine, bool(request.return_token_strs)
        _, model = self.gateway.served()
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("Send either prompt or messages.", param="prompt")
        if request.prompt is not None:
            special = request.add_special_tokens is not False
            encoding = await engine.encode([request.prompt], add_special_tokens=special, want_strings=strings)
        else:
            options = chat_options(request, trust_template=self.gateway.config.trust_request_chat_template)
            encoding = await engine.encode_chat(conversation(request.messages), options, want_strings=strings)
        tokens = encoding.ids[0].tolist()
        return {
            "count": len(tokens),
            "max_model_len": model.max_model_len,
            "tokens": tokens,
            "token_strs": encoding.strings[0] if strings else None,
        }


class DetokenizeEndpoint(_TextEndpoint[DetokenizeRequest]):
    """Token ids to text."""

    decoder = msgspec.json.Decoder(DetokenizeRequest)

    async def answer(self, request: DetokenizeRequest) -> dict[str, Any]:
        _, model = self.gateway.served()
        if request.tokens is None:
            raise RequestError("tokens is required: a list of token ids.", param="tokens")
        for token in request.tokens:
            if not 0 <= token < model.vocab_size:
                raise RequestError(
                    f"tokens must hold token ids from 0 to {model.vocab_size - 1}, got {token}.", param="tokens"
                )
        return {"prompt": await self.gateway.engine.decode(request.tokens)}
