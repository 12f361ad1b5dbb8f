"""A streaming client of /v1/completions that costs microseconds per event: one asyncio protocol per request."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import msgspec


class Choice(msgspec.Struct):
    """A choice of a streamed chunk."""

    text: str = ""
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    """Token counts, as the server sees them."""

    completion_tokens: int = 0


class Event(msgspec.Struct):
    """A streamed chunk; what else it holds is skipped."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


class BodyParser:
    """Cuts an HTTP/1.1 response into status and server-sent events, however its bytes arrive."""

    def __init__(self, on_event: Callable[[bytes], None]) -> None:
        self.status = 0  # 0 until the headers are there
        self.body = b""  # of an answer that is no event stream
        self.done = False
        self._on_event = on_event
        self._raw = b""  # not yet parsed
        self._text = b""  # of the event that has not ended
        self._stream = self._chunked = False
        self._left = 0  # bytes of the current chunk, or of a body of known length; -1: until the connection ends

    def feed(self, data: bytes) -> None:
        """More bytes from the connection."""
        self._raw += data
        if not self.status and not self._head():
            return
        if not self._chunked:
            taken, self._raw = self._raw, b""
            self._take(taken)
            self._left -= len(taken) if self._left >= 0 else 0
            self.done = self._left == 0
        while self._chunked and self._raw and not self.done:
            if not self._chunk():
                return

    def _head(self) -> bool:
        head, found, rest = self._raw.partition(b"\r\n\r\n")
        if not found:
            return False
        first, *lines = head.split(b"\r\n")
        headers = dict(line.lower().split(b": ", 1) for line in lines if b": " in line)
        self.status = int(first.split()[1])
        self._stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        self._chunked = b"chunked" in headers.get(b"transfer-encoding", b"")
        self._left = 0 if self._chunked else int(headers.get(b"content-length", b"-1"))
        self._raw = rest
        return True

    def _chunk(self) -> bool:
        """Takes what is there of a chunk; False when its size has not arrived whole."""
        if self._left == 0:
            line, found, rest = self._raw.removeprefix(b"\r\n").partition(b"\r\n")
            if not found:
                return False
            self._left = int(line.split(b";")[0], 16)
            self._raw = rest
            self.done = self._left == 0
        taken, self._raw = self._raw[: self._left], self._raw[self._left :]
        self._left -= len(taken)
        self._take(taken)
        return True

    def _take(self, data: bytes) -> None:
        if not self._stream:
            self.body += data
            return
        *events, self._text = (self._text + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                self._on_event(event[6:])


@dataclass
class Outcome:
    """What became of a request. Times in seconds of `time.perf_counter`."""

    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of each event with text
    ended: float = 0.0
    tokens: int = 0
    error: str = ""
    cut: bool = False  # by the client, at its deadline

    @property
    def ttft(self) -> float:
        """Seconds to the first text; if it was cut off before, the seconds it waited."""
        return (self.arrivals[0] if self.arrivals else self.ended) - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between texts."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def token_seconds(self) -> float:
        """Seconds per token after the first, however many a piece of text holds; 0 when there is none after it."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1) if len(self.arrivals) > 1 else 0.0


class _Request(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self.outcome = Outcome()
        self.heard = time.perf_counter()  # the last time that anything happened
        self._request = request
        self._done = done
        self._parser = BodyParser(self._event)
        self._decode = msgspec.json.Decoder(Event).decode
        self._finished = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.outcome.sent = self.heard = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.heard = time.perf_counter()
        self._parser.feed(data)
        if self._parser.done:
            self._transport.close()

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._finished = True
            self._transport.close()
            return
        event = self._decode(data)
        if event.error is not None:
            self.outcome.error = str(event.error)
        if event.usage is not None:
            self.outcome.tokens = event.usage.completion_tokens
        if event.choices and event.choices[0].text:
            self.outcome.arrivals.append(time.perf_counter())

    def give_up(self, error: str = "") -> None:
        """Ends the request: at the client's deadline, or with what is wrong."""
        self.outcome.cut, self.outcome.error = not error, error
        self.outcome.tokens = len(self.outcome.arrivals)
        self.outcome.ended = time.perf_counter()
        self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if self.outcome.ended:  # given up
            return
        self.outcome.ended = time.perf_counter()
        if self._parser.status != 200:
            self.outcome.error = f"status {self._parser.status}: {self._parser.body[:300].decode(errors='replace')}"
        elif not self._finished and not self.outcome.error:
            self.outcome.error = f"the stream broke off: {error or 'connection closed'}"
        elif not self.outcome.arrivals and not self.outcome.error:
            self.outcome.error = "the answer has no text"
        self.outcome.tokens = self.outcome.tokens or len(self.outcome.arrivals)
        if not self._done.done():
            self._done.set_result(None)


class Client:
    """Sends prompts of token ids to a server. A request that hears nothing for `stall` seconds has failed."""

    def __init__(self, url: str, model: str = "", stall: float = 300.0) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"the url must be http://host:port, not {url!r}")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.stall = stall
        self.deadline = math.inf  # of time.perf_counter: what still runs then is cut off
        self._host, self._port = parts.hostname, parts.port or 80
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        with urlopen(f"{self.url}/v1/models", timeout=10) as answer:
            return str(json.load(answer)["data"][0]["id"])

    async def complete(self, prompt: list[int] | str, output_tokens: int) -> Outcome:
        """Streams one greedy completion of exactly `output_tokens`. An error is in the outcome."""
        if time.perf_counter() >= self.deadline:
            return Outcome(cut=True)
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        payload = msgspec.json.encode(body)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        try:
            transport, request = await loop.create_connection(
                lambda: _Request(head.encode() + payload, done), self._host, self._port
            )
        except OSError as error:
            return Outcome(error=f"{self._host}:{self._port}: {error.strerror or error}")
        try:
            await self._watch(request, done)
        finally:
            transport.close()
        return request.outcome

    async def _watch(self, request: _Request, done: asyncio.Future[None]) -> None:
        while not done.done():
            now = time.perf_counter()
            silence, left = request.heard + self.stall - now, self.deadline - now
            if left <= 0:
                return request.give_up()
            if silence <= 0:
                return request.give_up(f"no byte for {self.stall:.0f} s")
            await asyncio.wait([done], timeout=min(silence, left))
        return None
