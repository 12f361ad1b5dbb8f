"""A small scheduler and a small tokenizer, in threads, that speak the real messages over real sockets.

The tokenizer's alphabet is the byte; ids from 256 on are special and have no text. The scheduler answers each request
with the ids that `answer` gives for it, as a worker would compute them: each id depends on the request and its index.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.addresses import front
from shared.bus import Link, RouterLink, Waiter
from shared.config import EngineConfig
from shared.messages import (
    MID_TEXT,
    Abort,
    CallFailed,
    Decode,
    Decoded,
    DecodedItem,
    DecodeItem,
    Delta,
    Deltas,
    Directory,
    EncodeChat,
    Encoded,
    EncodeText,
    GetVocabulary,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Peer,
    Rejected,
    Request,
    Stats,
    Submit,
    Unknown,
    Vocabulary,
    Welcome,
    pack_ids,
    unpack_ids,
)
from shared.model_info import ModelInfo

EOS = 256
MODEL = ModelInfo(
    path="", architecture="Fake", vocab_size=300, max_model_len=4096, eos_token_ids=[EOS], dtype="float32"
)
TIMEOUT = 10.0


class FakePeer:
    """A thread around a ROUTER. State is changed and waited for under `changed`."""

    def __init__(self, address: str) -> None:
        self.router = RouterLink(address)
        self.address = self.router.address
        self.changed = threading.Condition()
        self.log: list[Message] = []  # received
        self._alive = True
        self._pipe = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def set(self, **values: object) -> None:
        """Changes attributes and wakes the thread."""
        with self.changed:
            for name, value in values.items():
                assert hasattr(self, name)
                setattr(self, name, value)
        os.write(self._pipe[1], b"x")

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition, on this peer's state, holds."""

        def wait() -> bool:
            with self.changed:
                return self.changed.wait_for(condition, TIMEOUT)

        assert await asyncio.to_thread(wait), "timed out"

    def received(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.log if isinstance(message, kind)]

    def kill(self) -> None:
        """Gone without a word, like a killed process."""
        if self._alive:
            self.set(_alive=False)
            self._thread.join()
            self.router.close()
            while reachable(self.address):  # libzmq closes in its own thread
                time.sleep(0.001)
            for fd in self._pipe:
                os.close(fd)

    def _run(self) -> None:
        waiter = Waiter(self.router, fds=[self._pipe[0]])
        while self._alive:
            waiter.until(self.deadline())
            if readable(self._pipe[0]):
                os.read(self._pipe[0], 100)
            events = self.router.recv()
            with self.changed:
                for peer, event in events:
                    if not isinstance(event, Link):
                        self.log.append(event)
                        self.handle(peer, event)
                self.work()
                self.changed.notify_all()

    def deadline(self) -> float:
        return time.monotonic() + 0.5

    def handle(self, peer: bytes, message: Message) -> None:
        raise NotImplementedError

    def work(self) -> None:
        """Called after each wake-up."""


def readable(fd: int) -> bool:
    """Whether a read would find something."""
    return bool(select.select([fd], [], [], 0)[0])


def reachable(address: str) -> bool:
    """Whether something listens at an ipc address."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(address.removeprefix("ipc://")) == 0


class FakeTokenizer(FakePeer):
    """Answers at once, unless `holding`; tells its vocabulary only if `open`."""

    def __init__(self, address: str, *, open: bool = False) -> None:
        self.holding = False
        self.open = open
        self.held: list[tuple[bytes, Message]] = []
        super().__init__(address)

    @property
    def peer(self) -> Peer:
        return Peer(self.address, self.address)

    def handle(self, peer: bytes, message: Message) -> None:
        self.held.append((peer, message))

    def work(self) -> None:
        if not self.holding:
            for peer, message in self.held:
                self.router.send(peer, self.answer(message))
            self.held.clear()

    def answer(self, message: Message) -> Message:
        if isinstance(message, EncodeText):
            if "bad" in message.texts:
                return CallFailed(message.call, "no such text", "prompt")
            strings = [list(text) for text in message.texts] if message.want_strings else []
            return Encoded(message.call, [pack_ids(list(text.encode())) for text in message.texts], strings)
        if isinstance(message, EncodeChat):
            return Encoded(message.call, [pack_ids(list(message.messages))])
        if isinstance(message, GetVocabulary):
            pieces = [bytes([i]) for i in range(256)] + [b""] * 43
            return Vocabulary(message.call, pieces if self.open else [])
        assert isinstance(message, Decode)
        if any(299 in item.ids for item in message.items):
            return CallFailed(message.call, "299 is not a token")
        return Decoded(message.call, [decode_item(item) for item in message.items])


def decode_item(item: DecodeItem) -> DecodedItem:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    plain = bytes(i for i in item.ids if i < 256)
    text = decoder.decode(item.state.removeprefix(MID_TEXT) + plain, item.final)
    return DecodedItem(text, decoder.getstate()[0] or MID_TEXT)


@dataclass
class Running:
    """A request in the fake scheduler."""

    peer: bytes
    request: Request
    answer: list[int]  # all its output ids
    index: int = field(init=False)

    def __post_init__(self) -> None:
        self.index = len(unpack_ids(self.request.output))
        assert unpack_ids(self.request.output).tolist() == self.answer[: self.index]


class FakeScheduler(FakePeer):
    """Produces up to `allowed` ids of each sequence, `chunk` a step."""

    def __init__(
        self,
        address: str,
        answer: Callable[[Request], list[int]],
        tokenizers: list[FakeTokenizer],
        *,
        engine: EngineConfig | None = None,
        allowed: int = 1 << 30,
        limit: int = 1 << 30,
    ) -> None:
        self.epoch = time.time_ns()
        self.engine = engine or EngineConfig()
        self.answer = answer
        self.tokenizers = [tokenizer.peer for tokenizer in tokenizers]
        self.allowed = allowed
        self.chunk = 1
        self.limit = limit  # requests taken
        self.mangle: Callable[[list[Delta]], list[Delta]] = lambda items: items
        self.running: dict[tuple[bytes, int], Running] = {}  # ids are unique to an api process only
        self.apis: set[bytes] = set()
        self.notice: Message | None = None  # to be sent to all apis once
        super().__init__(front(address))

    def handle(self, peer: bytes, message: Message) -> None:
        if isinstance(message, Hello):
            self.apis.add(peer)
            self.running = {key: run for key, run in self.running.items() if run.peer != peer}
            self.router.send(peer, Welcome(self.epoch, self.engine, MODEL))
            self.router.send(peer, Directory(self.tokenizers))
            self.router.send(peer, self.stats())
        elif isinstance(message, Goodbye):
            self.apis.discard(peer)
        elif peer not in self.apis:
            self.router.send(peer, Unknown())
        elif isinstance(message, Heartbeat):
            self.router.send(peer, Heartbeat(self.epoch))
            self.router.send(peer, self.stats())
        elif isinstance(message, Submit):
            for request in message.requests:
                self.submit(peer, request)
        elif isinstance(message, Abort):
            for id in message.ids:
                self.running.pop((peer, id), None)

    def submit(self, peer: bytes, request: Request) -> None:
        if len(self.running) >= self.limit:
            self.router.send(peer, Rejected(request.id, request.attempt, "overloaded", "full"))
        elif request.priority < 0:
            self.router.send(peer, Rejected(request.id, request.attempt, "invalid", "no"))
        else:
            self.running[peer, request.id] = Running(peer, request, self.answer(request))

    def stats(self) -> Stats:
        return Stats(self.epoch, True, "", [], 0, len(self.tokenizers), 1)

    def deadline(self) -> float:
        return time.monotonic() + (0 if any(map(self.can_go_on, self.running.values())) else 0.5)

    def can_go_on(self, run: Running) -> bool:
        return run.index < min(self.allowed, len(run.answer))

    def work(self) -> None:
        if self.notice is not None:
            for peer in self.apis:
                self.router.send(peer, self.notice)
            self.notice = None
        outgoing: dict[bytes, list[Delta]] = {}
        for run in list(self.running.values()):
            if self.can_go_on(run):
                outgoing.setdefault(run.peer, []).append(self.step(run))
        for peer, items in outgoing.items():
            self.router.send(peer, Deltas(self.epoch, self.mangle(items)))

    def step(self, run: Running) -> Delta:
        first = run.index == len(unpack_ids(run.request.output))
        end = min(run.index + self.chunk, len(run.answer), self.allowed)
        ids = run.answer[run.index : end]
        delta = Delta(run.request.id, run.request.attempt, run.index, ids, cached=3 if first else -1)
        run.index = end
        if end == len(run.answer):
            delta.finish, delta.stop_token = finish_of(ids[-1], run.request)
            del self.running[run.peer, run.request.id]
        return delta


def finish_of(last: int, request: Request) -> tuple[str, int]:
    if last == EOS:
        return "stop", -1
    return ("stop", last) if last in request.params.stop_token_ids else ("length", -1)
