"""POST /v1/completions, and the room a prompt leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.api_server import LONGEST, NAME, VOCAB, ApiServer, api_server, byte_ids

COMPLETIONS = "/v1/completions"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ApiServer]:
    async with api_server(tmp_path_factory.mktemp("api")) as server:
        yield server


async def test_a_whole_reply_has_openais_shape(api: ApiServer) -> None:
    body = (await api.complete(model=NAME, prompt="SAY:hello.")).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert body["usage"]["prompt_tokens"] == len("SAY:hello.")


async def test_a_stream_has_the_shape_of_a_whole_reply_and_no_role(api: ApiServer) -> None:
    chunks = await api.chunks(COMPLETIONS, {"prompt": "SAY:hello."})
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    assert not any("delta" in chunk["choices"][0] for chunk in chunks)


async def test_the_default_is_sixteen_tokens(api: ApiServer) -> None:
    body = (await api.complete(prompt="x")).json()
    assert body["choices"][0]["text"] == "abcdefghijklmnop"
    assert body["choices"][0]["finish_reason"] == "length"


PROMPTS: list[Any] = [
    ["SAY:one.", "SAY:number two.", "SAY:3."],
    [byte_ids("SAY:one."), byte_ids("SAY:number two."), byte_ids("SAY:3.")],
]


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("n", [1, 2])
async def test_several_prompts(api: ApiServer, prompts: list[Any], n: int) -> None:
    expected = [text for text in ("one", "number two", "3") for _ in range(n)]
    body = (await api.complete(prompt=prompts, n=n)).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(3 * n))
    assert [choice["text"] for choice in body["choices"]] == expected
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert body["usage"]["completion_tokens"] == n * (4 + 11 + 2)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 * 3
    options = {"include_usage": True}
    *chunks, last = await api.chunks(COMPLETIONS, {"prompt": prompts, "n": n, "stream_options": options})
    texts = [""] * (3 * n)
    ends = [0] * (3 * n)
    for chunk in chunks:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] += choice["finish_reason"] == "stop"
    assert texts == expected
    assert ends == [1] * (3 * n)
    assert last["usage"] == body["usage"]


async def test_a_flat_list_of_ids_is_one_prompt_and_needs_no_tokenizer(api: ApiServer) -> None:
    before = len(api.tokenizer.log)
    body = (await api.complete(prompt=byte_ids("SAY:ids."))).json()
    assert [choice["text"] for choice in body["choices"]] == ["ids"]
    kinds = {type(message).__name__ for message in api.tokenizer.log[before:]}
    assert kinds <= {"Decode", "Hello", "Heartbeat"}


@pytest.mark.parametrize("field", ["best_of", "max_tokens", "logprobs", "echo", "suffix", "add_special_tokens"])
async def test_null_means_left_out(api: ApiServer, field: str) -> None:
    reply = await api.complete(prompt="SAY:ok.", **{field: None})
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["text"] == "ok"


async def test_neutral_values_are_taken(api: ApiServer) -> None:
    reply = await api.complete(prompt="SAY:ok.", n=2, best_of=2, echo=False, suffix="", logprobs=False, seed=-1)
    assert [choice["text"] for choice in reply.json()["choices"]] == ["ok", "ok"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("length", "limit"), [(200, LONGEST - 201), (200, LONGEST - 200), (LONGEST - 1, None)])
async def test_what_fits_is_served(api: ApiServer, length: int, limit: int | None, stream: bool) -> None:
    api.scheduler.set(chunk=64)
    body = {"prompt": "x" * length, "max_tokens": limit}
    if stream:
        chunks = await api.chunks(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
        reason, usage = chunks[-2]["choices"][0]["finish_reason"], chunks[-1]["usage"]
    else:
        reply = (await api.complete(**body)).json()
        reason, usage = reply["choices"][0]["finish_reason"], reply["usage"]
    assert reason == "length"
    assert usage["completion_tokens"] == (limit or 1)
    assert usage["total_tokens"] <= LONGEST


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("length", "limit"), [(200, LONGEST - 199), (LONGEST, None), (LONGEST + 1, None), (LONGEST, 1)]
)
async def test_what_does_not_fit_is_refused_with_the_numbers(
    api: ApiServer, length: int, limit: int | None, stream: bool
) -> None:
    reply = await api.complete(prompt="x" * length, max_tokens=limit, stream=stream)
    assert reply.status_code == 400
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "context_length_exceeded"
    assert f"maximum context length is {LONGEST} tokens" in error["message"]
    assert str(length) in error["message"]
    if length < LONGEST:
        assert error["param"] == "max_tokens"
        assert str(length + limit) in error["message"]
    else:
        assert error["param"] == "prompt"
    await api.survives()


SAMPLING: list[dict[str, Any]] = [
    *({"temperature": value} for value in (1e-4, 1e-8, 1e-45, 0, 2, 100)),
    *({"top_p": value} for value in (1e-9, 1)),
    *({"top_k": value} for value in (-1, 0, 1, VOCAB, VOCAB + 1, 2**31, 10**30)),
    *({"min_p": value} for value in (0, 1)),
    *({"seed": value} for value in (-1, 0, -(2**63), 2**63)),
]


async def test_all_sampling_values_in_range_at_once(api: ApiServer) -> None:
    replies = await asyncio.gather(*(api.complete(prompt="SAY:ok.", **value) for value in SAMPLING))
    assert [reply.json()["choices"][0]["text"] for reply in replies] == ["ok"] * len(SAMPLING)


async def test_the_openai_client(api: ApiServer) -> None:
    whole = await api.openai.completions.create(model=NAME, prompt="SAY:hello there.", max_tokens=40)
    assert whole.choices[0].text == "hello there"
    stream = await api.openai.completions.create(model=NAME, prompt="SAY:hello there.", stream=True, max_tokens=40)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "hello there"
