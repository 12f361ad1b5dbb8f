"""The HTTP gateway for tests: the real app, engine client and uvicorn in this loop, before a small engine.

The model speaks in bytes. A prompt that holds `SAY:text.` (up to the full stop) is answered with that text and the end
of sequence; any other with the alphabet, over and over, up to max_tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai

from services.api.gateway import Gateway
from services.api.server import make_server
from shared.api_config import ApiConfig
from shared.config import EngineConfig
from shared.engine import EngineClient
from shared.messages import GroupStats, Request, Stats, unpack_ids
from tests.engine_fakes import EOS, MODEL, FakeScheduler, FakeTokenizer

NAME = "byte-model"
LONGEST = MODEL.max_model_len
VOCAB = MODEL.vocab_size
ALPHABET = b"abcdefghijklmnopqrstuvwxyz"


def answer(request: Request) -> list[int]:
    """All output ids of a request."""
    limit = request.params.max_tokens
    assert limit is not None
    prompt = bytes(i for i in unpack_ids(request.prompt) if i < 256)
    if found := re.search(rb"SAY:(.*?)\.", prompt, re.DOTALL):
        ids = [*found[1], EOS]
    else:
        ids = list(itertools.islice(itertools.cycle(ALPHABET), limit))
    return ids[:limit]


class Scheduler(FakeScheduler):
    """With one worker group in its Stats."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.is_ready = True
        self.stalled = 0.0
        super().__init__(*args, **kwargs)

    def stats(self) -> Stats:
        group = GroupStats(
            group=0, ready=True, running=len(self.running), waiting=0, swapped=0, num_blocks=100, block_size=16,
            kv_usage=0.25, prefix_queries=40, prefix_hits=10, preemptions=3, prompt_tokens=50, generation_tokens=60,
            steps=7, stalled=self.stalled, step_tokens=110,
        )  # fmt: skip
        reason = "" if self.is_ready else "loading the model"
        return Stats(self.epoch, self.is_ready, reason, [group], 0, 1, 1)


class ApiServer:
    """Everything a test may want to reach."""

    def __init__(self, gateway: Gateway, scheduler: Scheduler, tokenizer: FakeTokenizer, port: int, key: str) -> None:
        self.gateway = gateway
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.AsyncClient(base_url=self.url, timeout=20, headers=headers)
        self.openai = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key or "not-needed", max_retries=0)

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json=body)

    async def chat(self, content: str = "hi", **body: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json={"messages": [message(content)], **body})

    async def events(self, path: str, body: dict[str, Any]) -> list[str]:
        """The events of a stream, read by a strict parser."""
        async with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            text = (await response.aread()).decode()
        assert response.status_code == 200, text
        assert response.headers["content-type"].startswith("text/event-stream")
        return parse_events(text)

    async def chunks(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The JSON of a stream that ends well."""
        *events, last = await self.events(path, body)
        assert last == "[DONE]"
        return [json.loads(event) for event in events]

    async def metrics(self) -> dict[str, float]:
        """Every sample of /metrics: name and labels to value."""
        page = (await self.http.get("/metrics")).text
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line[0] != "#"}

    async def survives(self) -> None:
        """The survival check: healthy, idle, and still giving right answers."""
        assert (await self.http.get("/health")).status_code == 200
        reply = await self.complete(prompt="SAY:still here.", temperature=0)
        assert reply.json()["choices"][0]["text"] == "still here"
        assert self.gateway.admission.active == 0
        await self.scheduler.until(lambda: not self.scheduler.running)


def message(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


def parse_events(text: str) -> list[str]:
    """The data of each server-sent event; nothing but data lines, comments and blank lines may occur."""
    assert text.endswith("\n\n")
    events = []
    for block in text[:-2].split("\n\n"):
        lines = block.split("\n")
        assert len(lines) == 1, f"an event of several lines: {block!r}"
        if lines[0].startswith(":"):
            assert "[DONE]" not in events, "a comment after the end"
        else:
            assert lines[0].startswith("data: "), lines[0]
            events.append(lines[0].removeprefix("data: "))
    return events


@contextlib.asynccontextmanager
async def api_server(
    folder: Path, *, engine: EngineConfig | None = None, ready: bool = True, **config: Any
) -> AsyncIterator[ApiServer]:
    """A running gateway; `config`: fields of ApiConfig."""
    address = f"ipc://{folder}"
    tokenizer = FakeTokenizer(f"{address}/tok")
    engine = engine or EngineConfig(model="/models/byte", served_model_name=[NAME, "alias"])
    scheduler = Scheduler(address, answer, [tokenizer], engine=engine)
    if not ready:
        scheduler.set(is_ready=False)
    client = EngineClient(address, name="test")
    gateway = Gateway(client, ApiConfig(**config))
    server = make_server(gateway)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        running = asyncio.create_task(server.serve(sockets=[listener]))
        await client.start()
        if ready:
            await asyncio.wait_for(client.wait_ready(), 20)
        api = ApiServer(gateway, scheduler, tokenizer, port, next(iter(gateway.config.api_key), ""))
        try:
            yield api
        finally:
            await api.http.aclose()
            await api.openai.close()
            gateway.drain()
            gateway.close()
            server.should_exit = True
            await running
            await client.close()
            scheduler.kill()
            tokenizer.kill()


def byte_ids(text: str) -> list[int]:
    return list(text.encode())
