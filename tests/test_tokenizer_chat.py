"""Conversations are rendered as transformers renders them; what requests get wrong is said in one line."""

from __future__ import annotations

import functools
import json
import time
from typing import Any

import pytest

from services.tokenizer.chat import MAX_TEMPLATE, ChatRenderer
from services.tokenizer.codec import Codec
from services.tokenizer.loading import load
from services.tokenizer.sandbox import MAX_RENDERED
from services.tokenizer.templates import environment, loops_over_content
from shared.chat import ChatOptions
from shared.errors import RequestError
from tests.model_factory import CHAT_TEMPLATE, smollm2

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
GUARDED = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('system role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
TOOLS = (
    "{{- bos_token }}{%- if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'banana' %}{% continue %}{% endif %}"
    "{% set ns.last = loop.index %}{{ m.role }}: {{ m.content }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "</call>{% endfor %}{% endif %}{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}\n{% endfor %}{% generation %}{{ ns.last }}{% endgeneration %}{{ eos_token }}"
    "{% if add_generation_prompt %}assistant:{% endif %}{{ dict(a=1) | tojson(indent=1) }}{{ thinking_mode }}"
)
PARTS = "{% for m in messages %}{% for part in m['content'] %}<{{ part.type }}>{{ part.text }}{% endfor %}{% endfor %}"

HI = [{"role": "user", "content": "hi"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": "ü"}'}}


@functools.cache
def codec() -> Codec:
    return load(smollm2())


def smol() -> ChatRenderer:
    return ChatRenderer(codec().chat_templates, codec().special_tokens)


def renderer(template: str) -> ChatRenderer:
    return ChatRenderer({"default": template}, SPECIAL)


def render(template: str | ChatRenderer, messages: Any, **options: Any) -> str:
    chosen = renderer(template) if isinstance(template, str) else template
    return chosen.render(json.dumps(messages).encode(), ChatOptions(**options))


def refused(template: str | ChatRenderer, messages: Any, **options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        render(template, messages, **options)
    assert caught.value.status == 400
    return caught.value


@functools.cache
def reference() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), bos_token="<s>", eos_token="</s>"
    )


CONVERSATIONS = [
    HI,
    [{"role": "system", "content": "be\nbrief "}, *HI, {"role": "assistant", "content": " hm "}],
    [*HI, {"role": "banana", "content": "?"}, {"role": "assistant", "content": "x", "reasoning": "because"}],
    [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "ü<"}}}]},
        {"role": "tool", "content": "17"},
    ],
]
TEMPLATES = {"chatml": CHAT_TEMPLATE, "tools": TOOLS, "smollm2": None}


@pytest.mark.parametrize(
    "options", [{}, {"tools": [{"type": "function", "function": {"name": "f"}}]}], ids=["", "tools"]
)
@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_equal_to_transformers(name: str, prompted: bool, options: dict[str, Any]) -> None:
    template = TEMPLATES[name] or codec().chat_templates["default"]
    for conversation in CONVERSATIONS:
        theirs = reference().apply_chat_template(
            conversation,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=prompted,
            thinking_mode="on",
            **options,
        )
        kwargs = {"thinking_mode": "on"}
        assert (
            render(template, conversation, add_generation_prompt=prompted, chat_template_kwargs=kwargs, **options)
            == theirs
        )


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"])
@pytest.mark.parametrize("text", ["Sure, ", "Sure", " two  spaces  ", "a\n"])
def test_continuing_equals_transformers(template: str, text: str) -> None:
    conversation = [*HI, {"role": "assistant", "content": text}]
    theirs = reference().apply_chat_template(
        conversation, chat_template=template, tokenize=False, continue_final_message=True
    )
    ours = render(template, conversation, continue_final_message=True, add_generation_prompt=False)
    assert ours == theirs
    assert "TAG" not in ours


def test_the_bundled_template_adds_a_system_prompt() -> None:
    assert render(smol(), HI).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert render(smol(), HI).endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "assistant",
    [
        {"content": None, "tool_calls": [CALL]},
        {"tool_calls": [CALL]},
        {"content": "", "tool_calls": [CALL]},
        {"content": None, "tool_calls": []},
        {"content": None, "tool_calls": None},
    ],
)
def test_null_content_never_shows(assistant: dict[str, Any]) -> None:
    messages = [*HI, {"role": "assistant", **assistant}, {"role": "tool", "tool_call_id": "c1", "content": "17"}]
    text = render(smol(), messages)
    assert "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n17<|im_end|>" in text
    assert not any(word in text for word in ("None", "null", "["))


def test_arguments_of_calls_are_objects_for_the_template() -> None:
    text = render(TOOLS, [*HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}])
    assert '<call>f {"x": "ü"}</call>' in text
    cut = {**CALL, "function": {"name": "f", "arguments": '{"x": '}}
    assert "<call>f" in render(TOOLS, [*HI, {"role": "assistant", "tool_calls": [cut]}])


def test_an_empty_list_of_calls_is_none() -> None:
    template = "{{ messages[0].tool_calls is defined }}{{ messages[1].tool_calls | length }}"
    assert render(template, [{"role": "assistant", "tool_calls": []}, {"role": "a", "tool_calls": [CALL]}]) == "False1"


def test_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"
    assert render(PARTS, [{"role": "user", "content": parts}]) == "<text>a<text>b"
    picture = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    error = refused(CHAT_TEMPLATE, [{"role": "user", "content": picture}])
    assert "only text" in error.message
    assert error.param == "messages[0].content"


def test_which_templates_loop_over_parts() -> None:
    assert loops_over_content(PARTS)
    assert loops_over_content("{% for m in messages %}{% set c = m.content %}{% for p in c %}{% endfor %}{% endfor %}")
    assert not loops_over_content(CHAT_TEMPLATE)
    assert not loops_over_content("{% for m in messages %}{{ m.content | trim }}{% endfor %}")


def test_developer_is_system_unless_the_template_knows_it() -> None:
    messages = [{"role": "developer", "content": "d"}]
    assert render("{{ messages[0].role }}", messages) == "system"
    assert render("{# developer #}{{ messages[0].role }}", messages) == "developer"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "system", "content": "x"}, *HI], "system role not supported"),
        ([{"role": "developer", "content": "x"}, *HI], "system role not supported"),
        ([*HI, *HI], "roles must alternate user/assistant"),
        ([{"role": "tool", "content": "x"}], "roles must alternate user/assistant"),
        ([{"role": "banana", "content": "x"}], "roles must alternate user/assistant"),
    ],
)
def test_a_template_refuses_in_its_own_words(messages: list[dict[str, Any]], said: str) -> None:
    error = refused(GUARDED, messages)
    assert (error.message, error.param) == (said, "messages")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages[0].nothing.more }}", "no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' + 1 }}", "cannot render these messages"),
        ("{{ messages.append(1) }}", "is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_failing_template_is_one_clear_line(template: str, said: str) -> None:
    error = refused(template, HI)
    assert said in error.message
    assert error.param == "messages"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ({}, "messages"),
        ([1], "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([*HI, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [5]}], "messages[0].tool_calls"),
    ],
)
def test_bad_messages_name_the_field(messages: Any, param: str) -> None:
    assert refused(smol(), messages).param == param


@pytest.mark.parametrize(
    "raw",
    [
        rb'[{"role":"user","content":"\ud83d"}]',
        b'[{"role":"user","content":"\xff"}]',
        b"[" * 100_000,
        b"",
        rb'[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\"x\":\"\\ud83d\"}"}}]}]',
    ],
    ids=["surrogate", "latin", "deep", "empty", "surrogate in arguments"],
)
def test_what_is_no_text_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        renderer(TOOLS).render(raw, ChatOptions())
    assert caught.value.param == "messages"


def test_nul_is_a_character_like_any_other() -> None:
    assert "a\0b" in render(smol(), [{"role": "user", "content": "a\0b"}])


def test_no_template_is_said() -> None:
    error = refused(ChatRenderer({}, {}), HI)
    assert "no chat template" in error.message


def test_templates_by_name_and_for_tools() -> None:
    chosen = ChatRenderer({"default": "plain", "tool_use": "tools", "rag": "rag"}, {})
    assert render(chosen, HI) == "plain"
    assert render(chosen, HI, tools=[{"type": "function"}]) == "tools"
    assert render(chosen, HI, tools=[]) == "plain"
    assert render(chosen, HI, chat_template="rag") == "rag"


def test_continuing_needs_something_to_continue() -> None:
    said = refused(smol(), HI, continue_final_message=True)
    assert said.param == "continue_final_message"
    hidden = refused("nothing shown", HI, continue_final_message=True, add_generation_prompt=False)
    assert hidden.param == "continue_final_message"
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "Su"}]}]
    assert render(PARTS, parts, continue_final_message=True, add_generation_prompt=False) == "<text>Su"
    empty = [{"role": "assistant", "content": []}]
    assert refused(PARTS, empty, continue_final_message=True, add_generation_prompt=False).param == "messages"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "chat_template", "tokenize"])
def test_kwargs_cannot_replace_fields(name: str) -> None:
    assert refused(smol(), HI, chat_template_kwargs={name: 1}).param == "chat_template_kwargs"


def test_a_namespace_guards_its_names() -> None:
    for text in ("{{ namespace(_x=1) }}", "{% set ns = namespace() %}{% set ns._x = 1 %}"):
        assert "underscore" in refused(text, HI).message
    assert environment().from_string("{{ namespace(self=1).self }}{{ dict.fromkeys('a', 1) }}").render() == "1{'a': 1}"


# A template that comes with the request runs in a process of its own.


def test_a_foreign_template_renders() -> None:
    own = "{{ bos_token }}{{ messages[0].content }}|{{ extra }}|{{ strftime_now('%Y') | length }}"
    assert render(smol(), HI, chat_template=own, chat_template_kwargs={"extra": "ü🌶"}) == "<|im_start|>hi|ü🌶|4"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('my own words') }}", "my own words"),
        ("{{ nothing.more }}", "'nothing' is undefined"),
        ("{% if %}", "not valid"),
        ("(" * 10 + "{{" + "(" * 30_000, "not valid"),
        ("{{ 'a' * 10 ** 10 }}", "MiB"),
        ("{{ 'a' * " + str(MAX_RENDERED + 1) + " }}", "characters"),
        ("x" * (MAX_TEMPLATE + 1), "at most"),
    ],
)
def test_a_failing_foreign_template_is_named(template: str, said: str) -> None:
    error = refused(smol(), HI, chat_template=template)
    assert said in error.message
    assert error.param == "chat_template"


def test_an_endless_foreign_template_is_stopped() -> None:
    start = time.monotonic()
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    assert "2 s" in refused(smol(), HI, chat_template=loop).message
    assert time.monotonic() - start < 20
