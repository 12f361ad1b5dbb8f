"""Server-sent events: the chunks of a stream, made of bytes prepared once and the text encoded per token."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from starlette.types import Send

from services.api.errors import error_json
from services.api.job import Job, Usage
from services.api.outlet import Outlet
from shared.engine import SampleDelta
from shared.errors import RequestError
from shared.turn import Turn

FIRST_IDLE = 0.5  # seconds the status line waits for the first token, so that a refusal can still be an HTTP error
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_encode = msgspec.json.Encoder().encode


class Shape(NamedTuple):
    """What differs between the chunks of chat and text completions."""

    object: str
    before_text: bytes
    after_text: bytes
    empty: bytes  # in place of the text
    opening: bytes  # likewise, in the first chunk of each choice; b"" where there is no such chunk


CHAT_CHUNK = Shape(
    object="chat.completion.chunk",
    before_text=b'"delta":{"content":',
    after_text=b"}",
    empty=b'"delta":{}',
    opening=b'"delta":{"role":"assistant","content":""}',
)
TEXT_CHUNK = Shape(object="text_completion", before_text=b'"text":', after_text=b"", empty=b'"text":""', opening=b"")


class Chunks:
    """Encodes a stream's chunks."""

    def __init__(
        self, shape: Shape, fixed: Mapping[str, object], choices: int, *, include_usage: bool, continuous_usage: bool
    ) -> None:
        """`fixed`: the fields that are the same in every chunk (id, created, model)."""
        base = b"data: " + _encode({**fixed, "object": shape.object})[:-1] + b',"choices":['
        self._shape = shape
        self._base = base
        self._heads = [base + b'{"index":%d,' % index for index in range(choices)]
        self._text_heads = [head + shape.before_text for head in self._heads]
        self._usage_in_each = continuous_usage
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._text_tail = shape.after_text + b',"logprobs":null,"finish_reason":null}' + self._tail

    def opening(self, usage: Usage) -> bytes:
        """The first chunk of every choice."""
        if not self._shape.opening:
            return b""
        tail = self._shape.opening + b',"logprobs":null,"finish_reason":null}' + self._end(usage.at_start())
        return b"".join(head + tail for head in self._heads)

    def deltas(self, deltas: list[SampleDelta], job: Job) -> bytes:
        """The chunks of what is new; deltas with neither text nor an end make none."""
        parts: list[bytes] = []
        for delta in deltas:
            if delta.finish_reason is not None:
                parts.append(self._last(delta, job.usage if self._usage_in_each else None))
            elif delta.text:
                head, text = self._text_heads[delta.index], _encode(delta.text)
                if self._usage_in_each:
                    close = self._shape.after_text + b',"logprobs":null,"finish_reason":null}'
                    parts += (head, text, close, self._end(job.usage))
                else:
                    parts += (head, text, self._text_tail)
        return b"".join(parts)

    def usage(self, usage: Usage) -> bytes:
        """The chunk that carries the usage and no choice."""
        return self._base + b'],"usage":' + _encode(usage) + b"}\n\n"

    def _last(self, delta: SampleDelta, usage: Usage | None) -> bytes:
        shape = self._shape
        text = shape.before_text + _encode(delta.text) + shape.after_text if delta.text else shape.empty
        reasons = b',"logprobs":null,"finish_reason":%b,"stop_reason":%b}' % (
            _encode(delta.finish_reason),
            _encode(delta.stop_reason),
        )
        return self._heads[delta.index] + text + reasons + (self._end(usage) if usage else self._tail)

    def _end(self, usage: Usage) -> bytes:
        return b'],"usage":' + _encode(usage) + b"}\n\n" if self._usage_in_each else self._tail


def error_events(error: RequestError) -> bytes:
    """How a stream ends that can go no further."""
    return b"data: " + error_json(error) + b"\n\n" + DONE


class EventStream:
    """One streaming reply: one write per turn that brings something, a comment when nothing has come for a while.

    What comes while the client reads too slowly is merged into the next write.
    """

    def __init__(
        self, send: Send, job: Job, chunks: Chunks, turn: Turn, *, include_usage: bool, ping_seconds: float
    ) -> None:
        self._send = send
        self._job = job
        self._chunks = chunks
        self._include_usage = include_usage
        self._ping_seconds = ping_seconds
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._last_write = loop.time()
        self._outlet = Outlet(send, turn, self._push)
        self._ended: asyncio.Future[None] = loop.create_future()  # nothing more will be written

    @property
    def opened(self) -> bool:
        """The status line has been sent."""
        return self._outlet.started

    async def run(self) -> None:
        """Sends everything. Raises RequestError when the engine does; before the first byte if `opened` is False."""
        self._job.listen(self._push)
        try:
            await self._ended
            await self._outlet.drained()
        finally:
            self._job.listen(None)
            self._outlet.close()
        if self._job.error is not None:
            raise self._job.error

    async def fail(self, error: RequestError) -> None:
        """Ends an opened stream with an error event."""
        await self._send(_body(error_events(error), more=False))

    def idle(self) -> float:
        """To be called now and then; returns in how many seconds again."""
        quiet = self._clock() - self._last_write
        if self._outlet.busy or self._ended.done():
            return self._ping_seconds
        if self.opened and quiet < self._ping_seconds:
            return self._ping_seconds - quiet
        self._write(PING if self.opened else b"")
        return self._ping_seconds

    def _push(self) -> None:
        """Writes what is new. Called for all streams of a step in turn, so none may suffer from another's fault."""
        if self._outlet.busy or self._ended.done():
            return
        try:
            if self._outlet.error is None:
                self._write_news()
            if self._outlet.error is not None or self._job.finished:
                self._ended.set_result(None)
        except Exception as error:
            self._ended.set_exception(error)

    def _write_news(self) -> None:
        job = self._job
        data = self._chunks.deltas(job.take(), job)
        if job.finished and job.error is None:
            last = self._chunks.usage(job.usage) if self._include_usage else b""
            self._write(data + last + DONE, more=False)
        elif data:
            self._write(data)

    def _write(self, data: bytes, *, more: bool = True) -> None:
        self._last_write = self._clock()
        if self.opened:
            self._outlet.write(_body(data, more=more))
            return
        start = {"type": "http.response.start", "status": 200, "headers": HEADERS}
        data = self._chunks.opening(self._job.usage) + data
        self._outlet.write(start, _body(data, more=more))


def _body(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}
