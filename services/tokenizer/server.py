"""A tokenizer on the bus: answers calls of api processes, and keeps the scheduler informed that it lives.

Streams come first: in every turn Decodes are answered at once, then Encodes for a few milliseconds; long ones go to
threads of their own, where `tokenizers` works outside the interpreter's lock.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from services.tokenizer.calls import Calls, EncodeCall
from services.tokenizer.loading import load
from shared.addresses import front, tokenizer_endpoint
from shared.bus import DealerLink, Link, RouterLink, Waiter, new_identity
from shared.errors import EXIT_CONFIG, StartupError
from shared.garbage import settle
from shared.hub import resolve
from shared.liveness import Membership
from shared.log import fail
from shared.messages import (
    CallFailed,
    Decode,
    EncodeChat,
    EncodeText,
    GetVocabulary,
    Goodbye,
    Hello,
    Message,
    Unknown,
    Welcome,
)
from shared.phases import Phases
from shared.wake import Wake

log = logging.getLogger(__name__)

ENCODE_SECONDS = 0.002  # spent on short Encodes before looking for Decodes again
LONG_THREADS = 2
FAREWELL_SECONDS = 1.0  # for the last messages to leave


class Model(NamedTuple):
    """What decides which tokenizer is loaded."""

    name: str
    revision: str
    path: str
    vocab_size: int


class TokenizerServer:
    """One tokenizer. It serves on while the scheduler is away."""

    def __init__(self, scheduler: str, phases: Phases | None = None) -> None:
        """Binds and connects; `phases` are logged when the tokenizer is there.

        Raises StartupError for an address that cannot be used.
        """
        self._phases = phases or Phases()
        identity = new_identity()
        self._router = RouterLink(tokenizer_endpoint(scheduler, identity.decode()))
        self._link = DealerLink(front(scheduler), identity)
        self._wake = Wake()
        self._waiter = Waiter(self._router, self._link, fds=[self._wake.fd])
        hello = Hello(role="tokenizer", name=f"{socket.gethostname()}:{os.getpid()}", instance=identity.decode())
        self._membership = Membership(hello, time.monotonic())
        self._calls: Calls | None = None
        self._model: Model | None = None  # loaded, or being loaded
        self._loaded: deque[tuple[Model, Calls | Exception]] = deque()
        self._short: deque[tuple[bytes, EncodeCall]] = deque()
        self._answers: deque[tuple[bytes, Message]] = deque()  # of long Encodes
        self._threads = ThreadPoolExecutor(LONG_THREADS, "encode")
        self._stopping = False
        self._exit: int | None = None

    def stop(self) -> None:
        """Makes `run` return soon; for signal handlers and other threads."""
        self._stopping = True
        self._wake.set()

    def run(self) -> int:
        """Serves until stopped or failed; returns the exit code."""
        log.info("connecting to the scheduler at %s", self._link.address)
        while self._exit is None and not self._stopping:
            self._waiter.until(0 if self._short else self._membership.wake_at)
            self._wake.clear()
            for event in self._link.recv():
                self._receive(event)
            while self._loaded:
                self._take_loaded(*self._loaded.popleft())
            self._serve()
            self._say(self._membership.tick(time.monotonic()))
        self._close()
        return self._exit or 0

    def _close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._router.flush(FAREWELL_SECONDS)
        self._link.send(Goodbye())
        self._link.flush(FAREWELL_SECONDS)

    def _serve(self) -> None:
        for peer, call in self._router.recv():
            self._take(peer, call)
        while self._answers:
            self._router.send(*self._answers.popleft())
        until = time.monotonic() + ENCODE_SECONDS
        while self._short and self._calls is not None and time.monotonic() < until:
            peer, encode = self._short.popleft()
            self._router.send(peer, self._calls.encode(encode))

    def _take(self, peer: bytes, call: Message | Link) -> None:
        if isinstance(call, GetVocabulary):
            self._router.send(peer, self._vocabulary(call))
        elif self._calls is None:
            return  # nobody has been told this address yet
        elif isinstance(call, Decode):
            self._router.send(peer, self._calls.decode(call))
        elif isinstance(call, EncodeText | EncodeChat):
            if self._calls.is_long(call):
                self._threads.submit(self._encode_long, self._calls, peer, call)
            else:
                self._short.append((peer, call))

    def _vocabulary(self, call: GetVocabulary) -> Message:
        if self._calls is None or self._model is None or call.model != self._model.path:
            return CallFailed(call.call, "This tokenizer has not loaded that model.", "model")
        return self._calls.vocabulary(call)

    def _encode_long(self, calls: Calls, peer: bytes, call: EncodeCall) -> None:
        self._answers.append((peer, calls.encode(call)))
        self._wake.set()

    def _receive(self, event: Message | Link) -> None:
        now = time.monotonic()
        self._membership.heard(now)
        match event:
            case Welcome():
                self._membership.welcome(event)
                self._start_loading(event)
            case Unknown():
                self._say(self._membership.unknown())
            case Link.UP:
                self._say(self._membership.connected(now))
            case Link.DOWN:
                log.warning("the scheduler is gone; serving on")
                self._membership.disconnected()

    def _start_loading(self, welcome: Welcome) -> None:
        engine, info = welcome.engine, welcome.model
        model = Model(engine.model, engine.revision, info.path, info.vocab_size)
        if model == self._model:
            return
        if self._calls is not None:
            log.info("the scheduler serves another model now: %s", info.path)
            self._announce("")
            self._short.clear()
        self._calls, self._model = None, model
        threading.Thread(target=self._load, args=(model,), name="load", daemon=True).start()

    def _load(self, model: Model) -> None:
        name, revision, path, vocab_size = model
        try:
            self._phases.end("waiting")
            here = Path(path) if Path(path).exists() else resolve(name, revision)
            calls: Calls | Exception = Calls(load(here, vocab_size))
            self._phases.end("tokenizer")
            log.info("loaded the tokenizer of %s, started in %s", here.name, self._phases)
        except Exception as error:
            calls = error
        self._loaded.append((model, calls))
        self._wake.set()

    def _take_loaded(self, model: Model, calls: Calls | Exception) -> None:
        if model != self._model:
            return  # another one is being loaded already
        if isinstance(calls, StartupError):
            fail(calls)
            self._exit = EXIT_CONFIG
        elif isinstance(calls, Exception):
            log.error("loading the tokenizer failed", exc_info=calls)
            self._exit = 1
        else:
            self._calls = calls
            settle()
            self._announce(self._router.address)

    def _announce(self, address: str) -> None:
        """Tells the scheduler where calls may be sent, or "" for nowhere."""
        self._membership.hello.address = address
        self._say(self._membership.unknown())

    def _say(self, messages: list[Message]) -> None:
        for message in messages:
            self._link.send(message)  # a lost Hello or heartbeat is repeated
