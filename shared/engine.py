"""The engine as the api process sees it: encode, generate, decode, over whatever processes are alive."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from array import array
from typing import Any, cast

import msgspec

from shared.admission import check_unicode, checked, failed, overloaded
from shared.bus import new_identity
from shared.chat import ChatOptions
from shared.detokenizer import Detokenizer, Stream
from shared.engine_state import EngineState
from shared.errors import RequestError
from shared.generation import Generation, Sample, SampleDelta
from shared.journal import Journal, Verdict
from shared.local_decoder import LocalDecoder
from shared.messages import (
    Decode,
    Decoded,
    DecodeItem,
    Deltas,
    Directory,
    EncodeChat,
    Encoded,
    EncodeText,
    Hello,
    Message,
    Rejected,
    Stats,
    Welcome,
    unpack_ids,
)
from shared.outbox import Outbox
from shared.sampling import SamplingParams
from shared.scheduler_link import SchedulerLink
from shared.tokenizer_pool import Answer, CallMessage, TokenizerPool
from shared.turn import Turn

__all__ = ["Encoding", "EngineClient", "EngineState", "Generation", "Sample", "SampleDelta"]

MAX_PARKED = 4096  # sequences taken at most while the scheduler is away


class Encoding(msgspec.Struct):
    """Token ids of each text, and their strings where asked for."""

    ids: list[array[int]]
    strings: list[list[str]] = []


class EngineClient:
    """A client of one engine, used from one event loop.

    All methods raise RequestError: 400 for bad input (with `param`), 503 with `retry_after` where the engine has no
    room or has never been ready, 500 (kind "server_error") where it failed. A lost process is never an error.
    """

    def __init__(self, scheduler: str, *, name: str = "") -> None:
        """`scheduler`: `tcp://host:port` or `ipc:///dir`; `name`: for the scheduler's log (default host:pid)."""
        self.state = EngineState()
        self._scheduler = scheduler
        self._name = name or f"{socket.gethostname()}:{os.getpid()}"
        identity = new_identity()
        self._instance = identity.decode()
        self._ready = asyncio.Event()
        self._journal = Journal()
        self._pool = TokenizerPool(identity, self._on_tokenizers)
        self._local = LocalDecoder(self._pool)
        self._detokenizer = Detokenizer(self._pool, self._local, self._on_stop, self._forget, self._fail)
        self._link: SchedulerLink | None = None
        self._streams: dict[int, Stream] = {}
        self.turn = Turn()  # for what its consumers put off, too
        self._outbox = Outbox(self._journal, self._send, self.turn)

    async def start(self) -> None:
        """Starts connecting in the background; does not wait for the engine."""
        self._link = SchedulerLink(
            self._scheduler,
            Hello("api", self._name, instance=self._instance),
            on_joined=self._on_joined,
            on_left=self._on_left,
            on_messages=self._on_messages,
            on_tick=self._on_tick,
        )

    async def wait_ready(self) -> None:
        """Returns once `state.ready`."""
        await self._ready.wait()

    async def encode(
        self, texts: list[str], *, add_special_tokens: bool = True, want_strings: bool = False
    ) -> Encoding:
        """Texts to token ids. Waits for a tokenizer if none is alive."""
        for text in texts:
            check_unicode(text, "prompt")
        return await self._encode(EncodeText(0, texts, add_special_tokens, want_strings))

    async def encode_chat(
        self, messages: list[dict[str, Any]], options: ChatOptions, want_strings: bool = False
    ) -> Encoding:
        """A conversation to token ids: `Encoding.ids` holds one array."""
        try:
            packed = msgspec.json.encode(messages), msgspec.json.encode(options)
        except UnicodeEncodeError as error:
            raise RequestError(f"messages must be valid Unicode: {error.reason}.", param="messages") from None
        except RecursionError:
            raise RequestError("messages are nested too deeply.", param="messages") from None
        return await self._encode(EncodeChat(0, *packed, want_strings))

    async def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Token ids to text."""
        item = DecodeItem(b"", list(ids), skip_special_tokens, True)
        return cast(Decoded, await self._call(Decode(0, [item]))).items[0].text

    def generate(self, prompt: array[int], params: SamplingParams, *, cache_salt: str = "") -> Generation:
        """Starts answering a prompt; returns at once.

        `params.seed` None: one is drawn; `params.max_tokens` None: what the context leaves. Raises RequestError (400)
        for an empty prompt, an id outside the vocabulary, or a prompt that leaves no room in the context; (503) before
        the first Welcome, or while the scheduler is away and enough requests are parked.
        """
        engine, model = self.state.engine, self.state.model
        if engine is None or model is None:
            raise overloaded(self.state.reason)
        if not self._outbox.is_open and len(self._journal) + params.n > MAX_PARKED:
            raise overloaded(f"Too many requests wait: {self.state.reason}")
        stops = params.stop
        params = checked(prompt, params, cache_salt, model)
        entries = self._journal.open(
            prompt, params, now=time.monotonic(), engine_seed=engine.seed, cache_salt=cache_salt
        )
        streams: list[Stream] = []
        generation = Generation(params.n, lambda: self._abandon(streams), self.turn)
        for index, entry in enumerate(entries):
            stream = Stream(entry, generation, index, stops, streams)
            streams.append(stream)
            self._streams[entry.id] = stream
            self._outbox.submit(entry)
        return generation

    async def close(self) -> None:
        """Says Goodbye and fails what is still running (503)."""
        for stream in list(self._streams.values()):
            self._fail(stream, overloaded("The server is shutting down."))
        self._outbox.flush()
        self._outbox.shut()
        self._pool.close()
        if self._link is not None:
            self._link.close()
            self._link = None
        self._refresh()

    # Tokenizers

    async def _encode(self, message: EncodeText | EncodeChat) -> Encoding:
        answer = cast(Encoded, await self._call(message))
        return Encoding([unpack_ids(ids) for ids in answer.ids], answer.strings)

    async def _call(self, message: CallMessage) -> Answer:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def answered(answer: Answer) -> None:
            if not future.done():
                future.set_result(answer)

        number = self._pool.call(message, answered)
        try:
            answer = await future
        finally:
            self._pool.cancel(number)
        if isinstance(answer, RequestError):
            raise answer
        return answer

    def _on_tokenizers(self) -> None:
        self._detokenizer.flush()
        if self.state.tokenizers != self._pool.connected:
            self._refresh()

    # Scheduler

    def _on_joined(self, welcome: Welcome) -> None:
        """Whatever was sent before is lost, in either direction: submit all that is not finished, oldest first."""
        self.state.engine, self.state.model, self.state.epoch = welcome.engine, welcome.model, welcome.epoch
        self._local.serve(welcome.model.path)
        self._outbox.restart()
        self._refresh()

    def _on_left(self) -> None:
        self._outbox.shut()
        self._refresh()

    def _on_messages(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, Deltas):
                self._on_deltas(message)
            elif isinstance(message, Stats):
                self.state.stats, self.state.heard = message, time.monotonic()
                self._refresh()
            elif isinstance(message, Directory):
                self._pool.update(message.tokenizers)
            elif isinstance(message, Rejected):
                self._on_rejected(message)
        self._detokenizer.flush()

    def _on_deltas(self, message: Deltas) -> None:
        """The one loop over the ids of a step."""
        if message.epoch != self.state.epoch:
            return
        streams = self._streams
        for delta in message.items:
            stream = streams.get(delta.id)
            if stream is None:
                if not delta.finish:  # an Abort was lost
                    self._outbox.abort(delta.id)
                continue
            entry = stream.entry
            verdict = entry.accept(delta)
            if verdict is Verdict.NEW:
                if entry.finish == "error":
                    self._fail(stream, failed(entry.message))
                    continue
                if delta.cached > 0:
                    stream.generation.samples[stream.index].cached_tokens = entry.cached
                self._detokenizer.push(stream)
            elif verdict is Verdict.GAP:
                self._outbox.resubmit(entry)

    def _on_rejected(self, message: Rejected) -> None:
        stream = self._streams.get(message.id)
        if stream is None or message.attempt != stream.entry.attempt:
            return
        if message.kind != "overloaded":
            self._fail(stream, RequestError(message.message))
        elif stream.entry.attempt == 0:
            self._fail(stream, overloaded(message.message))
        else:  # it was running before a recovery; that promise is kept
            self._outbox.retry(stream.entry)

    def _on_tick(self, now: float) -> None:
        self._pool.tick(now)
        self._local.ask()
        self._outbox.tick()
        self._detokenizer.flush()
        self._refresh()

    def _send(self, message: Message) -> bool:
        return self._link is not None and self._link.send(message)

    # Ends of sequences

    def _on_stop(self, stream: Stream) -> None:
        self._outbox.abort(stream.entry.id)

    def _forget(self, stream: Stream) -> None:
        stream.closed = True
        self._journal.close(stream.entry)
        self._streams.pop(stream.entry.id, None)

    def _abandon(self, streams: list[Stream]) -> None:
        for stream in streams:
            if not stream.closed:
                if not stream.entry.finish:
                    self._outbox.abort(stream.entry.id)
                self._forget(stream)

    def _fail(self, stream: Stream, error: RequestError) -> None:
        """One sample cannot be had, so the request fails as a whole."""
        self._abandon(stream.siblings)
        stream.generation.fail(error)

    # State

    def _refresh(self) -> None:
        state = self.state
        state.tokenizers = self._pool.connected
        state.judge("" if self._outbox.is_open else f"no answer from the scheduler at {self._scheduler}")
        if state.ready:
            self._ready.set()
        else:
            self._ready.clear()
