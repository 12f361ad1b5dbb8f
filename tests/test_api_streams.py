"""Streams in trouble: idle, broken, abandoned, slow, refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from shared.messages import Delta
from tests.api_server import NAME, ApiServer, api_server, message, parse_events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = {"prompt": "x", "max_tokens": 400}
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ApiServer]:
    async with api_server(tmp_path_factory.mktemp("api"), sse_ping_seconds=0.2) as api:
        yield api


@pytest_asyncio.fixture(loop_scope="module")
async def api(server: ApiServer) -> AsyncIterator[ApiServer]:
    yield server
    server.scheduler.set(allowed=1 << 30, limit=1 << 30, mangle=lambda items: items)
    server.tokenizer.set(holding=False)
    await server.survives()


class RawStream:
    """A POST whose reply is read from the socket as it comes."""

    def __init__(self, api: ApiServer) -> None:
        self.api = api
        self.text = ""

    async def __aenter__(self) -> RawStream:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.api.port, limit=1 << 22)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    def send(self, path: str, body: dict[str, Any], *headers: str) -> None:
        data = json.dumps(body).encode()
        head = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(data)}", *headers, "", ""]
        self.writer.write("\r\n".join(head).encode() + data)

    async def until(self, text: str, start: int = 0) -> str:
        """Reads until the text has come, from `start` on; all that came."""
        async with asyncio.timeout(20):
            while text not in self.text[start:]:
                data = await self.reader.read(1 << 16)
                assert data, f"closed after {self.text!r}"
                self.text += data.decode("latin-1")
        return self.text


async def test_pings_come_while_idle_and_only_between_events(api: ApiServer) -> None:
    api.scheduler.set(allowed=0)
    async with RawStream(api) as raw:
        raw.send(CHAT, {"messages": [message("SAY:hello.")], "stream": True})
        before = await raw.until(": ping\n\n")
        assert before.index('"role":"assistant"') < before.index(": ping")  # the stream is open while it waits
        api.scheduler.set(allowed=2)
        await raw.until('e"}')
        await raw.until(": ping\n\n", start=len(raw.text))
        api.scheduler.set(allowed=1 << 30)
        text = await raw.until("0\r\n\r\n")
    body = text.split("\r\n\r\n", 1)[1]
    events = parse_events(dechunked(body))
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "hello"


def dechunked(body: str) -> str:
    """The text of a chunked body."""
    text = ""
    while True:
        size, _, body = body.partition("\r\n")
        if int(size, 16) == 0:
            return text
        text += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]


async def test_pings_do_not_disturb_the_openai_client(api: ApiServer) -> None:
    api.scheduler.set(allowed=0)
    messages: Any = [message("SAY:hello.")]
    stream = await api.openai.chat.completions.create(model=NAME, messages=messages, stream=True)
    await asyncio.sleep(0.5)  # two pings
    api.scheduler.set(allowed=1 << 30)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello"


def break_after(index: int, message: str = "the worker found a NaN") -> Any:
    """A mangle for the scheduler: every sequence fails once it has so many tokens."""

    def mangle(items: list[Delta]) -> list[Delta]:
        for item in items:
            if item.index >= index:
                item.finish, item.message = "error", message
        return items

    return mangle


async def broken_stream(api: ApiServer, body: dict[str, Any], mangle: Any) -> list[str]:
    """The events of a stream that is broken once its first token is there."""
    api.scheduler.set(allowed=1)
    async with RawStream(api) as raw:
        raw.send(COMPLETIONS, {**body, "stream": True})
        await raw.until('"text":"a"')
        api.scheduler.set(mangle=mangle, allowed=1 << 30)
        text = await raw.until("0\r\n\r\n")
    assert text.startswith("HTTP/1.1 200")
    return parse_events(dechunked(text.split("\r\n\r\n", 1)[1]))


async def test_a_failure_in_a_stream_is_an_event(api: ApiServer) -> None:
    events = await broken_stream(api, LONG, break_after(5))
    assert events[-1] == "[DONE]"
    error = json.loads(events[-2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "server_error"
    assert "NaN" in error["message"]
    assert "choices" in json.loads(events[-3])


async def test_the_openai_client_raises_on_it(api: ApiServer) -> None:
    api.scheduler.set(allowed=1)
    stream = await api.openai.completions.create(model=NAME, prompt="x", max_tokens=100, stream=True)
    assert (await anext(stream)).choices[0].text == "a"
    api.scheduler.set(mangle=break_after(1), allowed=1 << 30)
    with pytest.raises(openai.APIError, match="NaN"):
        [chunk async for chunk in stream]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_is_an_http_error(api: ApiServer, stream: bool) -> None:
    api.scheduler.set(mangle=break_after(0))
    reply = await api.complete(prompt="x", stream=stream)
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_scheduler_is_a_503(api: ApiServer, stream: bool) -> None:
    api.scheduler.set(limit=0)
    reply = await api.complete(prompt="x", stream=stream)
    assert reply.status_code == 503
    assert int(reply.headers["retry-after"]) >= 1
    assert reply.json()["error"]["type"] == "server_error"


async def test_one_of_several_prompts_fails(api: ApiServer) -> None:
    def mangle(items: list[Delta]) -> list[Delta]:
        return break_after(3)(items[:1]) + items[1:]

    events = await broken_stream(api, {"prompt": ["x", "y"], "max_tokens": 50}, mangle)
    assert "error" in json.loads(events[-2])
    api.scheduler.set(mangle=break_after(3))
    assert (await api.complete(prompt=["x", "y"], max_tokens=50)).status_code == 500


@pytest.mark.parametrize("body", [LONG, {**LONG, "n": 4}, {**LONG, "prompt": ["x", "y"]}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_everything(api: ApiServer, body: dict[str, Any], stream: bool) -> None:
    count = body.get("n", 1) * (2 if isinstance(body["prompt"], list) else 1)
    api.scheduler.set(allowed=3)
    async with RawStream(api) as raw:
        raw.send(COMPLETIONS, {**body, "stream": stream})
        await api.scheduler.until(lambda: len(api.scheduler.running) == count)
        if stream:
            await raw.until('"text"')
    await api.scheduler.until(lambda: not api.scheduler.running)


async def test_a_client_that_leaves_before_its_prompt_is_encoded(api: ApiServer) -> None:
    api.tokenizer.set(holding=True)
    async with RawStream(api) as raw:
        raw.send(COMPLETIONS, {"prompt": "held", "stream": True})
        await api.tokenizer.until(lambda: bool(api.tokenizer.held))
    while api.gateway.admission.active:
        await asyncio.sleep(0.01)
    api.tokenizer.set(holding=False)
    assert not api.scheduler.running


async def test_many_abandoned_streams(api: ApiServer) -> None:
    async def abandon(index: int) -> None:
        async with api.http.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as response:
            lines = response.aiter_lines()
            for _ in range(1 + index % 5):
                await anext(lines, "")  # a slow reader finds all in a few lines

    for start in range(0, 48, 16):
        await asyncio.gather(*(abandon(start + i) for i in range(16)))
    await api.scheduler.until(lambda: not api.scheduler.running)
    tasks = [task for task in asyncio.all_tasks() if "run_while_connected" in repr(task)]
    assert not tasks


async def test_two_streams_with_the_same_client_id(api: ApiServer) -> None:
    async def read(text: str) -> tuple[str, str]:
        headers = {"X-Request-Id": "same"}
        body = {"prompt": f"SAY:{text}.", "stream": True, "max_tokens": 50, "request_id": "same"}
        async with api.http.stream("POST", COMPLETIONS, json=body, headers=headers) as response:
            events = parse_events((await response.aread()).decode())
        assert response.headers["x-request-id"] == "same"
        chunks = [json.loads(event) for event in events[:-1]]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks), chunks[0]["id"]

    (one, id_one), (two, id_two) = await asyncio.gather(read("the first"), read("the second"))
    assert (one, two) == ("the first", "the second")
    assert id_one != id_two


async def test_a_reader_that_is_slow_gets_everything_and_holds_up_nobody(api: ApiServer) -> None:
    api.scheduler.set(chunk=16)
    async with RawStream(api) as raw:
        raw.send(COMPLETIONS, {"prompt": "x", "max_tokens": 4000, "stream": True})
        await api.scheduler.until(lambda: bool(api.scheduler.running))
        assert (await api.complete(prompt="SAY:quick.")).json()["choices"][0]["text"] == "quick"
        text = await raw.until("0\r\n\r\n")
    events = parse_events(dechunked(text.split("\r\n\r\n", 1)[1]))
    texts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
    assert "".join(texts) == ("abcdefghijklmnopqrstuvwxyz" * 160)[:4000]
    api.scheduler.set(chunk=1)


async def test_requests_in_one_write_are_answered_in_order(api: ApiServer) -> None:
    async with RawStream(api) as raw:
        raw.send(COMPLETIONS, {"prompt": "SAY:first."})
        raw.send(COMPLETIONS, {"prompt": "SAY:second."})
        text = await raw.until('"second"')
    assert text.index('"first"') < text.index('"second"')


async def test_expect_100_continue(api: ApiServer) -> None:
    async with RawStream(api) as raw:
        raw.send(COMPLETIONS, {"prompt": "SAY:ok."}, "Expect: 100-continue")
        text = await raw.until('"ok"')
    assert text.startswith("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")
