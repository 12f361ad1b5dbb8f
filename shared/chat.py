"""How a conversation is to be rendered; travels as JSON inside `EncodeChat`."""

from __future__ import annotations

from typing import Any

import msgspec


class ChatOptions(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The chat-template options of a request (api-level names)."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, Any]] | None = None
