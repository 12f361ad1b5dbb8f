"""Conversations to prompts, through the model's chat template, as transformers' `apply_chat_template` does it.

Where OpenAI's requests and templates differ, the request is put into the shape templates expect:

    content null or missing      ""
    content a list of text parts joined by newlines, unless the template itself loops over parts
    tool_calls [] or null        left out
    arguments, a JSON string     the object in it
    role "developer"             "system", unless the template speaks of "developer"
    reasoning, thinking          also under the name `reasoning_content`
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jinja2
import msgspec

from services.tokenizer.sandbox import TemplateFailure, render_untrusted
from services.tokenizer.templates import environment, loops_over_content
from shared.chat import ChatOptions
from shared.errors import RequestError

MAX_TEMPLATE = 64 << 10  # characters of a template that comes with a request
MAX_MESSAGE = 1000  # characters of a template's own error
END_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
RESERVED = {"messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"}
REASONING = ("reasoning_content", "thinking", "reasoning")

Conversation = list[dict[str, Any]]


class ChatRenderer:
    """Renders conversations for one model."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._templates = dict(templates)
        self._special = dict(special_tokens)

    def is_slow(self, options: ChatOptions) -> bool:
        """Whether rendering starts a process: the request brings a template of its own."""
        return options.chat_template is not None and options.chat_template not in self._templates

    def render(self, messages: bytes, options: ChatOptions) -> str:
        """The prompt of a conversation given as JSON. Raises RequestError that names the field at fault."""
        template = self._choose(options)
        wants_parts, knows_developer = _traits(template)
        conversation = [
            _message(message, i, wants_parts, knows_developer) for i, message in enumerate(_parse(messages))
        ]
        final = _open_final(conversation, options)
        variables = {
            **self._special,
            **_extra(options.chat_template_kwargs),
            "messages": conversation,
            "tools": options.tools or None,
            "add_generation_prompt": options.add_generation_prompt,
        }
        variables.setdefault("documents", None)
        text = _render_foreign(template, variables) if self.is_slow(options) else _render_own(template, variables)
        if not _is_unicode(text):
            raise RequestError("messages hold half of a surrogate pair, which is no character.", param="messages")
        return text if final is None else _cut(text, final)

    def _choose(self, options: ChatOptions) -> str:
        given = options.chat_template
        if given is not None:
            if len(given) > MAX_TEMPLATE:
                raise RequestError(
                    f"chat_template has {len(given)} characters; at most {MAX_TEMPLATE} are allowed.",
                    param="chat_template",
                )
            return self._templates.get(given, given)
        if options.tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise RequestError(
                "This model has no chat template: use /v1/completions, or send one as chat_template.",
                param="messages",
            )
        return self._templates["default"]


@lru_cache(maxsize=64)
def _traits(template: str) -> tuple[bool, bool]:
    """Whether a template loops over content parts, and whether it knows the role `developer`."""
    try:
        return loops_over_content(template), "developer" in template
    except (jinja2.TemplateSyntaxError, RecursionError) as error:
        raise RequestError(f"The chat template is not valid: {error}", param="chat_template") from None


def _parse(messages: bytes) -> Conversation:
    try:
        return msgspec.json.decode(messages, type=Conversation)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RequestError(f"messages must be a list of objects in valid JSON: {error}", param="messages") from None


def _message(message: dict[str, Any], index: int, wants_parts: bool, knows_developer: bool) -> dict[str, Any]:
    """A message in the shape that templates expect."""
    where = f"messages[{index}]"
    out = {key: value for key, value in message.items() if value is not None}
    if not isinstance(out.get("role"), str):
        raise RequestError(f"{where}.role must be a string.", param=f"{where}.role")
    if out["role"] == "developer" and not knows_developer:
        out["role"] = "system"
    out["content"] = _content(out.get("content", ""), f"{where}.content", wants_parts)
    calls = out.pop("tool_calls", None)
    if calls:
        out["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    reasoning = next((out[key] for key in REASONING if key in out), None)
    return out if reasoning is None else {"thinking": reasoning, **out, "reasoning_content": reasoning}


def _content(content: Any, where: str, wants_parts: bool) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of parts.", param=where)
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise RequestError(f"{where}[{i}] is not a text part; only text is supported.", param=where)
    texts = [part.get("text", part.get("refusal")) for part in content]
    return [{"type": "text", "text": text} for text in texts] if wants_parts else "\n".join(texts)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RequestError(f"{where} must be a list of objects.", param=where)
    return [_tool_call(call) for call in calls]


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call  # the model wrote it, cut off perhaps; the template shows it as it is
    return {**call, "function": {**function, "arguments": arguments}}


def _extra(values: dict[str, Any]) -> dict[str, Any]:
    reserved = RESERVED & values.keys()
    if reserved:
        raise RequestError(
            f"chat_template_kwargs cannot hold {min(reserved)!r}: it is a field of its own.",
            param="chat_template_kwargs",
        )
    return values


def _open_final(conversation: Conversation, options: ChatOptions) -> str | None:
    """Tags the end of the message that is to be continued; returns its text. None when none is."""
    if not conversation:
        raise RequestError("messages must not be empty.", param="messages")
    if not options.continue_final_message:
        return None
    if options.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other: set add_generation_prompt to false.",
            param="continue_final_message",
        )
    content = conversation[-1]["content"]
    if isinstance(content, str):
        conversation[-1]["content"] = content + END_TAG
        return content
    if not content:
        raise RequestError("The last message has no text to continue.", param="messages")
    text: str = content[-1]["text"]
    content[-1]["text"] = text + END_TAG
    return text


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _cut(text: str, final: str) -> str:
    """The prompt up to the end of its last message's text."""
    end = text.rfind(END_TAG.strip())
    if end < 0 or final.strip() not in text:
        raise RequestError(
            "The last message cannot be continued: the chat template does not show it as it is.",
            param="continue_final_message",
        )
    whole = text.startswith(END_TAG, end)
    return text[:end] if whole else text[:end].rstrip()  # a template that trims has trimmed the tag's space


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    return environment().from_string(template)


def _render_own(template: str, variables: dict[str, Any]) -> str:
    """Renders one of the model's own templates."""
    try:
        return _compiled(template).render(**variables)
    except jinja2.TemplateError as error:
        raise RequestError(str(error)[:MAX_MESSAGE], param="messages") from None
    except Exception as error:  # a template is a program, and the request is its input
        text = f"The chat template cannot render these messages: {error}"
        raise RequestError(text[:MAX_MESSAGE], param="messages") from None


def _render_foreign(template: str, variables: dict[str, Any]) -> str:
    """Renders a template that came with the request."""
    try:
        return render_untrusted(template, variables)
    except TemplateFailure as error:
        raise RequestError(str(error)[:MAX_MESSAGE], param="chat_template") from None
