"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.api_server import LONGEST, NAME, ApiServer, api_server, message

CHAT = "/v1/chat/completions"


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ApiServer]:
    async with api_server(tmp_path_factory.mktemp("api")) as server:
        yield server


async def test_a_whole_reply_has_openais_shape(api: ApiServer) -> None:
    reply = await api.chat("SAY:hello.", model=NAME)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == NAME
    assert body["created"] > 1_700_000_000
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    usage = body["usage"]
    assert usage["completion_tokens"] == len("hello") + 1  # the end of sequence counts
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_a_stream_has_openais_shape(api: ApiServer) -> None:
    body = {"model": "alias", "messages": [message("SAY:hello.")]}
    chunks = await api.chunks(CHAT, body)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["model"] == NAME
    first, *texts, last = [c["choices"][0] for c in chunks]
    assert first == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    assert all(choice["finish_reason"] is None for choice in texts)
    assert last["finish_reason"] == "stop"
    assert "".join(choice["delta"].get("content", "") for choice in [*texts, last]) == "hello"
    assert not any("usage" in chunk for chunk in chunks)


async def test_headers_of_a_stream(api: ApiServer) -> None:
    body = {"messages": [message("SAY:x.")], "stream": True}
    async with api.http.stream("POST", CHAT, json=body) as response:
        await response.aread()
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"


async def test_usage_comes_in_a_chunk_of_its_own(api: ApiServer) -> None:
    body = {"messages": [message("SAY:hello.")], "stream_options": {"include_usage": True}}
    *chunks, last = await api.chunks(CHAT, body)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == (await api.chat("SAY:hello.")).json()["usage"]


async def test_continuous_usage(api: ApiServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": [message("no end")], "max_tokens": 6, "stream_options": options}
    chunks = await api.chunks(CHAT, body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 6)


async def test_n_choices(api: ApiServer) -> None:
    whole = (await api.chat("SAY:abc.", n=3)).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in whole["choices"]} == {"abc"}
    chunks = await api.chunks(CHAT, {"messages": [message("SAY:abc.")], "n": 3})
    opening = chunks[:3]
    assert [c["choices"][0]["index"] for c in opening] == [0, 1, 2]
    assert all(c["choices"][0]["delta"] == {"role": "assistant", "content": ""} for c in opening)
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "abc"
        assert [c["finish_reason"] for c in mine].count("stop") == 1
    assert whole["usage"]["completion_tokens"] == 3 * 4
    assert whole["usage"]["prompt_tokens"] == (await api.chat("SAY:abc.")).json()["usage"]["prompt_tokens"]


async def test_every_reply_has_n_choices_under_load(api: ApiServer) -> None:
    replies = await asyncio.gather(*(api.chat("go on", n=8, max_tokens=24, stop=["m"]) for _ in range(24)))
    for reply in replies:
        choices = reply.json()["choices"]
        assert sorted(choice["index"] for choice in choices) == list(range(8))
        assert {choice["message"]["content"] for choice in choices} == {"abcdefghijkl"}
        assert {(choice["finish_reason"], choice["stop_reason"]) for choice in choices} == {("stop", "m")}


async def test_text_beyond_ascii_is_the_same_streamed_and_whole(api: ApiServer) -> None:
    text = '你好,🌶 ď 👩‍🚀 "end"\n\\ \u2028'
    whole = (await api.chat(f"SAY:{text}.")).json()["choices"][0]["message"]["content"]
    events = await api.events(CHAT, {"messages": [message(f"SAY:{text}.")]})
    assert not any("\\ud" in event for event in events)
    streamed = "".join(json.loads(e)["choices"][0]["delta"].get("content", "") for e in events[:-1])
    # the prompt is JSON, so the model is shown, and repeats, the escapes of JSON
    assert whole == streamed == json.dumps(text, ensure_ascii=False)[1:-1]


async def test_a_cut_inside_a_character_is_the_same_streamed_and_whole(api: ApiServer) -> None:
    whole = (await api.chat("SAY:🌶🌶.", max_tokens=6)).json()["choices"][0]
    chunks = await api.chunks(CHAT, {"messages": [message("SAY:🌶🌶.")], "max_tokens": 6})
    assert whole["message"]["content"] == "🌶\ufffd"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "🌶\ufffd"
    assert whole["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_cuts_the_text(api: ApiServer, include: bool) -> None:
    body: dict[str, Any] = {
        "messages": [message("SAY:Hello world again.")],
        "stop": ["orl"],
        "include_stop_str_in_output": include,
    }
    whole = (await api.http.post(CHAT, json=body)).json()["choices"][0]
    chunks = await api.chunks(CHAT, body)
    expected = "Hello worl" if include else "Hello w"
    assert whole["message"]["content"] == expected
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", "orl")
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == expected
    assert chunks[-1]["choices"][0]["stop_reason"] == "orl"
    await api.survives()


async def test_max_tokens_defaults_to_what_the_context_leaves(api: ApiServer) -> None:
    filler = "x" * (LONGEST - 200)
    body = (await api.chat(filler)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == LONGEST


async def test_max_completion_tokens_wins(api: ApiServer) -> None:
    body = (await api.chat("go", max_tokens=3, max_completion_tokens=5)).json()
    assert body["usage"]["completion_tokens"] == 5


NULLABLE = (
    "model temperature top_p top_k min_p n stop seed logprobs top_logprobs logit_bias stream stream_options user"
    " max_tokens max_completion_tokens presence_penalty frequency_penalty response_format tools tool_choice"
    " parallel_tool_calls stop_token_ids ignore_eos min_tokens skip_special_tokens metadata store service_tier"
)


@pytest.mark.parametrize("field", NULLABLE.split())
async def test_null_means_left_out(api: ApiServer, field: str) -> None:
    plain = await api.chat("SAY:ok.")
    reply = await api.chat("SAY:ok.", **{field: None})
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"] == plain.json()["choices"]


@pytest.mark.parametrize(
    "field",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"a_field_of_next_year": {"x": [1]}},
        {"logprobs": False, "top_logprobs": 0, "presence_penalty": 0, "frequency_penalty": 0.0},
        {"repetition_penalty": 1.0, "logit_bias": {}, "response_format": {"type": "text"}, "tools": []},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
    ],
)
async def test_fields_without_effect_are_taken(api: ApiServer, field: dict[str, Any]) -> None:
    reply = await api.chat("SAY:ok.", **field)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == "ok"


async def rendered(api: ApiServer, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the template is given: the test tokenizer's ids are the bytes of the messages as JSON."""
    tokens = (await api.http.post("/tokenize", json={"messages": messages})).json()["tokens"]
    found: list[dict[str, Any]] = json.loads(bytes(tokens))
    return found


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize(
    "assistant",
    [
        {"content": None, "tool_calls": [CALL]},
        {"tool_calls": [CALL]},
        {"content": "", "tool_calls": [CALL]},
        {"content": None, "tool_calls": []},
        {"content": None, "tool_calls": None, "reasoning_content": "hm", "refusal": None},
    ],
)
async def test_an_assistant_turn_without_content(api: ApiServer, assistant: dict[str, Any]) -> None:
    messages = [
        message("hi"),
        {"role": "assistant", **assistant},
        {"role": "tool", "tool_call_id": "c1", "content": "17"},
    ]
    assert (await api.http.post(CHAT, json={"messages": messages, "max_tokens": 2})).status_code == 200
    turn = (await rendered(api, messages))[1]
    assert turn["content"] == ""
    assert set(turn) <= {"role", "content", "tool_calls"}
    if assistant.get("tool_calls"):
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
        assert turn["tool_calls"] == [call]
    else:
        assert "tool_calls" not in turn


async def test_messages_are_normalised(api: ApiServer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [message("be brief", "developer"), {"role": "user", "content": parts, "name": "ann", "x": 1}]
    assert await rendered(api, messages) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "ann"},
    ]


async def test_the_openai_client(api: ApiServer) -> None:
    messages: Any = [message("SAY:hello there.")]
    whole = await api.openai.chat.completions.create(model=NAME, messages=messages)
    assert whole.choices[0].message.content == "hello there"
    stream = await api.openai.chat.completions.create(
        model=NAME, messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello there"
    assert chunks[-1].usage == whole.usage
    with pytest.raises(openai.NotFoundError) as caught:
        await api.openai.chat.completions.create(model="nope", messages=messages)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        await api.openai.chat.completions.create(model=NAME, messages=[])
    assert refused.value.param == "messages"
