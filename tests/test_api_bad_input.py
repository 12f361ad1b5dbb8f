"""Input that is wrong: each gets a 4xx in OpenAI's shape that names the field, and nothing else is disturbed."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.api_server import NAME, VOCAB, ApiServer, api_server, message

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ApiServer]:
    async with api_server(tmp_path_factory.mktemp("api"), max_body_bytes=300_000) as server:
        yield server


def error_of(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of a refusal."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    body = json.loads(reply.content.decode("utf-8"))
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in error["message"]
    assert len(error["message"]) < 500
    return error


OUT_OF_RANGE: list[tuple[str, Any, str]] = [
    ("max_tokens", 0, "0"),
    ("max_tokens", -1, "-1"),
    ("max_tokens", "16", '"16"'),
    ("max_tokens", 1.5, "1.5"),
    ("max_tokens", True, "true"),
    ("max_completion_tokens", 0, "0"),
    ("temperature", -0.1, "-0.1"),
    ("temperature", 101, "101"),
    ("temperature", "hot", '"hot"'),
    ("top_p", 0, "0"),
    ("top_p", 1.01, "1.01"),
    ("top_k", -2, "-2"),
    ("top_k", 1.5, "1.5"),
    ("min_p", 1.1, "1.1"),
    ("min_p", -0.1, "-0.1"),
    ("n", 0, "0"),
    ("n", 129, "129"),
    ("n", 10**30, "1000000"),
    ("seed", 2**64, str(2**64)),
    ("seed", "x", '"x"'),
    ("stop", "", '""'),
    ("stop", [""], '""'),
    ("stop", ["x", ""], '""'),
    ("stop", ["a", "b", "c", "d", "e"], "5"),
    ("stop", 5, "5"),
    ("stop", [5], "5"),
    ("stop_token_ids", [VOCAB], str(VOCAB)),
    ("stop_token_ids", [-1], "-1"),
    ("stop_token_ids", ["a"], '"a"'),
    ("min_tokens", -1, "-1"),
    ("min_tokens", 5000, "5000"),
    ("stream", "yes", '"yes"'),
    ("stream_options", {"include_usage": True}, "stream"),
    ("stream_options", 5, "5"),
    ("ignore_eos", "no", '"no"'),
    ("model", 5, "5"),
    ("cache_salt", 5, "5"),
]


@pytest.mark.parametrize(("field", "value", "shown"), OUT_OF_RANGE)
async def test_values_out_of_range(api: ApiServer, field: str, value: Any, shown: str) -> None:
    for reply in (await api.complete(prompt="x", **{field: value}), await api.chat("x", **{field: value})):
        error = error_of(reply)
        assert error["type"] == "invalid_request_error"
        assert error["param"].split("[")[0] == field
        assert field in error["message"]
        assert shown in error["message"]


async def test_a_message_names_the_value_and_what_would_be_right(api: ApiServer) -> None:
    error = error_of(await api.complete(prompt="x", max_tokens="16"))
    assert error["message"] == 'max_tokens: expected int | null, got str: "16".'
    error = error_of(await api.complete(prompt="x", top_p=0))
    assert error["message"] == "top_p must be in (0, 1], got 0.0."


@pytest.mark.parametrize(
    "prompt",
    [
        "", [""], [], [[]], ["a", ""], None, 5, {"a": 1}, [1, "a"], [[1], 2], [[1], "a"], [[1.5]], [VOCAB], [-1],
        [[5], [VOCAB]], [10**30], [True], "x" * 200_000, ["x"] * 3000,
    ],
    ids=lambda prompt: str(prompt)[:30],
)  # fmt: skip
async def test_wrong_prompts(api: ApiServer, prompt: Any) -> None:
    for stream in (False, True):
        error = error_of(await api.complete(prompt=prompt, stream=stream))
        assert error["param"].split("[")[0] == "prompt"
    await api.survives()


IMAGE = {"type": "image_url", "image_url": {"url": "http://example.com/x.png"}}
WRONG_MESSAGES: list[tuple[Any, str]] = [
    (None, "messages"),
    ([], "messages"),
    ("hi", "messages"),
    ([5], "messages[0]"),
    ([{"content": "x"}], "messages[0].role"),
    ([message("x", "banana")], "messages[0].role"),
    ([message("x"), message("x", "")], "messages[1].role"),
    ([message(5)], "messages[0].content"),
    ([message([IMAGE])], "messages[0].content[0].type"),
    ([message([{"type": "text", "text": 5}])], "messages[0].content[0].text"),
    ([message([{"text": "x"}])], "messages[0].content[0].type"),
    ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "messages[0].tool_calls[0].function"),
]


@pytest.mark.parametrize(("messages", "param"), WRONG_MESSAGES)
async def test_wrong_messages(api: ApiServer, messages: Any, param: str) -> None:
    for path in (CHAT, "/tokenize"):
        if path == CHAT or messages is not None:
            error = error_of(await api.http.post(path, json={"messages": messages}))
            assert error["param"] == param
            assert param in error["message"]


async def test_empty_content_is_fine(api: ApiServer) -> None:
    assert (await api.chat("", max_tokens=2)).status_code == 200


UNBUILT: list[dict[str, Any]] = [
    {"logprobs": True}, {"logprobs": 0}, {"logprobs": 5}, {"top_logprobs": 3}, {"echo": True}, {"suffix": "x"},
    {"presence_penalty": 0.5}, {"frequency_penalty": -1}, {"repetition_penalty": 1.1}, {"logit_bias": {"5": 1}},
    {"logit_bias": {"abc": 1}}, {"response_format": {"type": "json_object"}}, {"guided_json": {"type": "object"}},
    {"guided_choice": ["a"]}, {"structured_outputs": {"regex": "a"}}, {"lora_name": "x"}, {"prompt_logprobs": 0},
    {"allowed_token_ids": [5]}, {"bad_words": ["x"]}, {"use_beam_search": True}, {"return_token_ids": True},
    {"truncate_prompt_tokens": 5}, {"priority": 1}, {"typical_p": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("field", UNBUILT, ids=json.dumps)
async def test_what_is_not_built_is_refused_by_name(api: ApiServer, field: dict[str, Any]) -> None:
    for reply in (await api.complete(prompt="x", **field), await api.chat("x", **field)):
        error = error_of(reply)
        assert error["code"] == "not_supported"
        assert error["param"] == next(iter(field))


CHAT_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"modalities": ["audio"]}, "modalities"),
]


@pytest.mark.parametrize(("field", "param"), CHAT_ONLY)
async def test_chat_fields(api: ApiServer, field: dict[str, Any], param: str) -> None:
    assert error_of(await api.chat("x", **field))["param"] == param


async def test_best_of_more_than_n(api: ApiServer) -> None:
    error = error_of(await api.complete(prompt="x", best_of=2))
    assert (error["param"], error["code"]) == ("best_of", "not_supported")


async def test_an_unknown_model(api: ApiServer) -> None:
    for reply in (
        await api.complete(model="nope", prompt="x"),
        await api.chat("x", model="nope"),
        await api.http.post("/tokenize", json={"model": "nope", "prompt": "x"}),
        await api.http.get("/v1/models/nope"),
        await api.http.get("/v1/models/some/nope"),
    ):
        error = error_of(reply, 404)
        assert error["code"] == "model_not_found"
        assert NAME in error["message"]


def raw(text: str) -> bytes:
    return b'{"prompt": "' + text.encode() + b'"}'


BODIES: list[tuple[bytes, int]] = [
    (b"", 400),
    (b"   ", 400),
    (b"{", 400),
    (b"[]", 400),
    (b'"x"', 400),
    (b"null", 400),
    (b'{"prompt": "x"} trailing', 400),
    (b'{"prompt": NaN}', 400),
    (b'{"prompt": "x", "temperature": 1e999}', 400),
    (b'{"prompt": "x", "top_p": Infinity}', 400),
    (b"\xff", 400),
    (b'{"prompt": "\xff"}', 400),
    (b'{"prompt": "x", "user": "\xff"}', 400),
    (b'{"prompt": "x", "user": "\xe4\xbd"}', 400),
    ('{"prompt": "你好"}'.encode("gbk"), 400),
    ('{"prompt": "x"}'.encode("utf-16"), 400),
    (b'\xef\xbb\xbf{"prompt": "x"}', 400),
    (raw(r"\ud83d"), 400),
    (raw(r"\ude00"), 400),
    (raw(r"a\ud83d b"), 400),
    (b'{"prompt": "x", "stop": "\\ud83d"}', 400),
    (b'{"prompt": "x", "user": "\\ud83d"}', 400),
    (b'{"prompt": "x", "a": ' + b"[" * 100_000 + b"}", 400),
    (b'{"prompt": ' + b"[" * 100_000 + b"}", 400),
    (raw("x" * 400_000), 413),
    (raw(r"\u0000 NUL"), 200),
    (raw(r"\ud83d\ude00"), 200),
    (b'\n {"prompt": "x", "prompt": "y"}\n', 200),
]


@pytest.mark.parametrize(("body", "status"), BODIES, ids=[repr(body[:24]) for body, _ in BODIES])
async def test_bodies(api: ApiServer, body: bytes, status: int) -> None:
    reply = await api.http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    if status == 200:
        assert reply.status_code == 200, reply.text
    else:
        error_of(reply, status)
    await api.survives()


async def test_a_lone_surrogate_is_named(api: ApiServer) -> None:
    for body in (raw(r"\ud83d"), b'{"messages": [{"role": "user", "content": "\\udc00"}]}'):
        path = CHAT if b"messages" in body else COMPLETIONS
        reply = await api.http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert "surrogate" in error_of(reply)["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "application/vnd.api+json"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Encoding": "gzip"}, 415),
        ({"Content-Encoding": "identity"}, 200),
    ],
)
async def test_media_types(api: ApiServer, headers: dict[str, str], status: int) -> None:
    content = b'{"prompt": "SAY:ok."}'
    if headers.get("Content-Encoding") == "gzip":
        content = gzip.compress(content)
    reply = await api.http.post(COMPLETIONS, content=content, headers=headers)
    if status == 200:
        assert reply.json()["choices"][0]["text"] == "ok"
    else:
        error_of(reply, status)


async def test_a_chunked_body(api: ApiServer) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b'{"prompt": '
        yield b'"SAY:ok."}'

    reply = await api.http.post(COMPLETIONS, content=parts())
    assert reply.json()["choices"][0]["text"] == "ok"


async def test_a_chunked_body_over_the_limit(api: ApiServer) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 10_000

    error = error_of(await api.http.post(COMPLETIONS, content=parts()), 413)
    assert "300000 bytes" in error["message"]
    await api.survives()


async def test_a_body_cut_off(api: ApiServer) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    await api.survives()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", "/v1/models/", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/v1/completions", 405),
        ("PUT", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
        ("DELETE", "/v1/models", 405),
        ("OPTIONS", "/v1/completions", 405),
        ("GET", "/%00/" + "x" * 5000, 404),
    ],
)
async def test_routes(api: ApiServer, method: str, path: str, status: int) -> None:
    reply = await api.http.request(method, path)
    error_of(reply, status)
    if status == 405:
        assert reply.headers["allow"]


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": [message("x")]}, {"prompt": 5}, {"prompt": ["x"]}])
async def test_tokenize(api: ApiServer, body: dict[str, Any]) -> None:
    assert error_of(await api.http.post("/tokenize", json=body))["param"].startswith("prompt")


@pytest.mark.parametrize("body", [{}, {"tokens": [VOCAB]}, {"tokens": [-1]}, {"tokens": "x"}, {"tokens": ["x"]}])
async def test_detokenize(api: ApiServer, body: dict[str, Any]) -> None:
    assert error_of(await api.http.post("/detokenize", json=body))["param"].startswith("tokens")


async def test_a_running_stream_is_not_disturbed(api: ApiServer) -> None:
    api.scheduler.set(allowed=3)
    running = asyncio.create_task(api.chunks(COMPLETIONS, {"prompt": "x", "max_tokens": 200}))
    await api.scheduler.until(lambda: bool(api.scheduler.running))
    for body, status in BODIES:
        if status != 200:
            await api.http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert not running.done()
    api.scheduler.set(allowed=1 << 30)
    text = "".join(chunk["choices"][0]["text"] for chunk in await running)
    assert text == ("abcdefghijklmnopqrstuvwxyz" * 8)[:200]
