"""A conversation as clients send it, and as chat templates take it.

Documented choices: the role "developer" is passed on as "system", which every template knows; content null or missing
is ""; text parts are joined with a line break; reasoning of earlier turns is left out.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from services.api.errors import not_supported, shorten
from shared.chat import ChatOptions
from shared.errors import RequestError

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class ContentPart(msgspec.Struct, kw_only=True):
    """A piece of a message; only text is served."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """What an earlier turn called."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    """A call an earlier turn made."""

    function: FunctionCall
    id: str | None = None
    type: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """A message as clients send it."""

    role: str
    content: str | list[str | ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ChatFields(Protocol):
    """What decides how a conversation is rendered: fields of the chat request and of the chat form of /tokenize."""

    messages: list[ChatMessage] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    tools: list[dict[str, Any]] | None
    add_special_tokens: bool | None


def chat_options(fields: ChatFields, *, trust_template: bool, with_tools: bool = True) -> ChatOptions:
    """The template's options. Raises RequestError."""
    kwargs = fields.chat_template_kwargs or {}
    for param, given in (
        ("chat_template", fields.chat_template),
        ("chat_template_kwargs.chat_template", kwargs.get("chat_template")),
    ):
        if given is not None and not trust_template:
            raise RequestError(f"{param} is not allowed here (--trust-request-chat-template is off).", param=param)
    go_on = bool(fields.continue_final_message)
    if go_on and fields.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other; set one of them.",
            param="continue_final_message",
        )
    return ChatOptions(
        add_generation_prompt=not go_on if fields.add_generation_prompt is None else fields.add_generation_prompt,
        continue_final_message=go_on,
        add_special_tokens=bool(fields.add_special_tokens),
        chat_template=fields.chat_template,
        chat_template_kwargs=kwargs,
        tools=(fields.tools or None) if with_tools else None,
    )


def conversation(messages: list[ChatMessage] | None) -> list[dict[str, Any]]:
    """The messages as templates take them. Raises RequestError."""
    if not messages:
        raise RequestError("messages must hold at least one message.", param="messages")
    return [_normal(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normal(message: ChatMessage, where: str) -> dict[str, Any]:
    role = _ROLES.get(message.role)
    if role is None:
        known = ", ".join(_ROLES)
        raise RequestError(
            f"{where}.role must be one of {known}, got {shorten(message.role)!r}.", param=f"{where}.role"
        )
    normal: dict[str, Any] = {"role": role, "content": _text(message.content, f"{where}.content")}
    if message.name is not None:
        normal["name"] = message.name
    if message.tool_call_id is not None:
        normal["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        normal["tool_calls"] = [_normal_call(call) for call in message.tool_calls]
    return normal


def _text(content: str | list[str | ContentPart] | None, where: str) -> str:
    if not isinstance(content, list):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
        elif part.type in ("text", "input_text", "output_text"):
            texts.append(part.text or "")
        elif part.type == "refusal":
            texts.append(part.refusal or "")
        else:
            param = f"{where}[{index}].type"
            raise not_supported(param, f"{param}: this model takes text only, got {shorten(part.type)!r}.")
    return "\n".join(texts)


def _normal_call(call: ToolCall) -> dict[str, Any]:
    """Templates expect the arguments as an object, clients send them as JSON text."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError):
            arguments = call.function.arguments
    normal: dict[str, Any] = {
        "type": "function",
        "function": {"name": call.function.name, "arguments": {} if arguments is None else arguments},
    }
    return {"id": call.id, **normal} if call.id is not None else normal
