"""`kill -9` of any process but the gateway never fails a stream, nor changes its text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import pytest

from tests.stack import Stack, serving

STREAMS = 16
TOKENS = 48
PROMPTS = [f"Write a story about the number {i}, a fox and a {word}." for i in range(8) for word in ("river", "lamp")]


def body(i: int) -> dict[str, object]:
    """Greedy for even streams, sampled with a seed for odd ones."""
    return {
        "messages": [{"role": "user", "content": PROMPTS[i]}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0 if i % 2 == 0 else 0.8,
        "seed": i,
    }


async def events(client: httpx.AsyncClient, i: int) -> AsyncIterator[dict[str, object]]:
    async with client.stream("POST", "/v1/chat/completions", json=body(i)) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line[6:])


async def one_stream(client: httpx.AsyncClient, i: int, on_piece: Callable[[], None]) -> tuple[str, str]:
    """The text and finish reason of a stream."""
    text, reason = "", ""
    async for event in events(client, i):
        assert "error" not in event, event
        choice = event["choices"][0]  # type: ignore[index]
        text += choice["delta"].get("content") or ""
        reason = choice["finish_reason"] or reason
        on_piece()
    return text, reason


async def all_streams(url: str, kills: list[Callable[[], object]]) -> list[tuple[str, str]]:
    """Runs the streams at once; each kill happens after a further share of all pieces has arrived."""
    pieces = 0
    due = [int(STREAMS * TOKENS * 0.6 * (k + 1) / (len(kills) + 1)) for k in range(len(kills))]

    def on_piece() -> None:
        nonlocal pieces
        pieces += 1
        if due and pieces >= due[0]:
            due.pop(0)
            kills.pop(0)()

    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=180, limits=limits) as client:
        results = await asyncio.gather(*(one_stream(client, i, on_piece) for i in range(STREAMS)))
    assert not kills, "a kill never happened"
    return results


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with serving("--tokenizers", "2", "--workers", "1", "--max-model-len", "1024", "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> list[tuple[str, str]]:
    results = asyncio.run(all_streams(stack.url, []))
    assert all(text and reason == "length" for text, reason in results)
    assert len({text for text, _ in results}) > STREAMS / 2
    return results


@pytest.mark.parametrize(
    "kinds", [["tokenizer"], ["worker"], ["scheduler"], ["tokenizer", "worker", "scheduler"]], ids="-".join
)
def test_no_stream_fails_or_changes(stack: Stack, undisturbed: list[tuple[str, str]], kinds: list[str]) -> None:
    killed: list[int] = []
    kills: list[Callable[[], object]] = [lambda kind=kind: killed.append(stack.kill(kind)) for kind in kinds]
    assert asyncio.run(all_streams(stack.url, kills)) == undisturbed
    assert len(killed) == len(kinds)
    for kind, pid in zip(kinds, killed, strict=True):
        assert any(kind in line and str(pid) in line and "SIGKILL" in line for line in stack.lines), stack.log()
    stack.wait_idle()
