"""What chat and text completions do alike: read, check, encode, generate, and answer, streaming or whole."""

from __future__ import annotations

import logging
import time
import uuid
from abc import ABC, abstractmethod
from array import array
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.api.body import ClientGone, parse, read_body
from services.api.errors import internal_error
from services.api.exchange import run_while_connected
from services.api.fields import GenerationRequest, with_room
from services.api.gateway import Gateway
from services.api.job import Job
from services.api.sse import FIRST_IDLE, Chunks, EventStream, Shape
from services.api.unbuilt import refuse_unbuilt
from shared.engine import Sample
from shared.errors import RequestError
from shared.model_info import ModelInfo
from shared.sampling import SamplingParams

EncodePrompts = Callable[[], "Awaitable[list[array[int]]]"]  # array is generic to type checkers alone
RequestType = TypeVar("RequestType", bound=GenerationRequest)
log = logging.getLogger(__name__)


class GenerationEndpoint(ABC, Generic[RequestType]):
    """An ASGI app for one POST route."""

    decoder: msgspec.json.Decoder[RequestType]
    shape: ClassVar[Shape]  # of stream chunks
    object: ClassVar[str]  # of whole replies
    id_prefix: ClassVar[str]
    prompt_param: ClassVar[str]  # the field the prompt comes from
    default_max_tokens: ClassVar[int | None]  # None: what the context leaves

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    @abstractmethod
    def prepare(self, request: RequestType, model: ModelInfo) -> EncodePrompts:
        """Checks the request's own fields and returns what will encode its prompts. Raises RequestError."""

    @abstractmethod
    def choice(self, index: int, sample: Sample) -> dict[str, Any]:
        """A finished choice of a whole reply."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival = time.monotonic()
        body = await read_body(scope, receive, self.gateway.config.max_body_bytes)
        request = parse(self.decoder, body)
        refuse_unbuilt(body)
        _, model = self.gateway.served()
        name = self.gateway.model_name(request.model)
        params = request.sampling_params(model)
        encode = self.prepare(request, model)
        with self.gateway.admitted():
            reply = _Reply(self, request, encode, name, params, arrival)
            try:
                await reply.serve(scope, receive, send)
            finally:
                if reply.job is not None:
                    reply.job.close()


class _Reply(Generic[RequestType]):
    """One admitted request on its way to its answer."""

    def __init__(
        self,
        endpoint: GenerationEndpoint[RequestType],
        request: RequestType,
        encode: EncodePrompts,
        name: str,
        params: SamplingParams,
        arrival: float,
    ) -> None:
        self.job: Job | None = None
        self._endpoint = endpoint
        self._gateway = endpoint.gateway
        self._request = request
        self._encode = encode
        self._params = params
        self._name = name
        self._arrival = arrival
        self._stream: EventStream | None = None
        self._fixed = {"id": endpoint.id_prefix + uuid.uuid4().hex, "created": int(time.time()), "model": name}

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers. Raises RequestError, ClientGone before the first byte; a fault after it becomes an event."""
        work = self._run_stream(send) if self._request.stream else self._run_whole(scope, receive, send)
        idle = self._idle if self._request.stream else None
        try:
            await run_while_connected(work, receive, self._gateway.closing, idle, FIRST_IDLE)
        except RequestError as error:
            await self._end_stream(error)
        except ClientGone:
            raise
        except Exception:
            if self._stream is None or not self._stream.opened:
                raise
            log.exception("a stream failed")
            await self._end_stream(internal_error())

    async def _end_stream(self, error: RequestError) -> None:
        if self._stream is None or not self._stream.opened:
            raise error
        await self._stream.fail(error)

    async def _start(self) -> Job:
        gateway = self._gateway
        _, model = gateway.served()
        prompts = [(prompt, self._settle(prompt, model)) for prompt in await self._encode()]
        salt = self._request.cache_salt or ""
        self.job = Job(gateway.engine, gateway.metrics, self._name, prompts, salt, self._arrival)
        return self.job

    def _settle(self, prompt: array[int], model: ModelInfo) -> SamplingParams:
        endpoint = self._endpoint
        return with_room(
            self._params,
            len(prompt),
            model,
            default=endpoint.default_max_tokens,
            prompt=endpoint.prompt_param,
            limit=self._request.max_tokens_param,
        )

    async def _run_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = await self._start()
        choices = [self._endpoint.choice(index, sample) for index, sample in enumerate(await job.samples())]
        body = {**self._fixed, "object": self._endpoint.object, "choices": choices, "usage": job.usage}
        await Response(msgspec.json.encode(body), media_type="application/json")(scope, receive, send)

    async def _run_stream(self, send: Send) -> None:
        job = await self._start()
        request = self._request
        chunks = Chunks(
            self._endpoint.shape,
            self._fixed,
            job.choices,
            include_usage=request.include_usage,
            continuous_usage=request.continuous_usage,
        )
        ping = self._gateway.config.sse_ping_seconds
        turn = self._gateway.engine.turn
        self._stream = EventStream(send, job, chunks, turn, include_usage=request.include_usage, ping_seconds=ping)
        await self._stream.run()

    async def _idle(self) -> float:
        return self._stream.idle() if self._stream else FIRST_IDLE
