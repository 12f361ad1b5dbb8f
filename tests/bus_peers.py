"""Peers for tests of the services: real processes, and ends of links that a test drives by hand."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from shared.addresses import back, front
from shared.bus import DealerLink, Link, RouterLink, Waiter, new_identity
from shared.config import EngineConfig
from shared.messages import Assign, Heartbeat, Hello, Message, Unknown, Welcome
from shared.model_info import ModelInfo

PATIENCE = 20.0  # seconds; only a failing test waits for so long
M = TypeVar("M", bound=Message)

MODEL = ModelInfo(
    path="none", architecture="NullForCausalLM", vocab_size=1000, max_model_len=512, eos_token_ids=[2], dtype="float32"
)


class Process:
    """A service as a real process, with its stderr kept."""

    def __init__(self, service: str, *flags: str, env: dict[str, str] | None = None) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", f"services.{service}", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        self.lines.extend(line.rstrip() for line in self.popen.stderr)

    def wait(self) -> int:
        """The exit code, once it has ended by itself."""
        code = self.popen.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._reader.join(PATIENCE)

    def terminate(self) -> int:
        self.popen.terminate()
        return self.wait()


@contextlib.contextmanager
def running(service: str, *flags: str, env: dict[str, str] | None = None) -> Iterator[Process]:
    """A process of `services.{service}` that does not outlive the block."""
    process = Process(service, *flags, env=env)
    try:
        yield process
    finally:
        process.kill()


class Inbox:
    """What a link has received, to be waited for. Other messages stay for later expectations."""

    def __init__(self, link: RouterLink | DealerLink) -> None:
        self.link = link
        self.pending: list[Any] = []
        self._waiter = Waiter(link)

    def wait_for(self, wanted: Callable[[Any], bool], seconds: float = PATIENCE) -> Any:
        """The first received item that is wanted."""
        deadline = time.monotonic() + seconds
        while True:
            for item in self.pending:
                if wanted(item):
                    self.pending.remove(item)
                    return item
            left = deadline - time.monotonic()
            assert left > 0, f"only received {str(self.pending[-20:])[:2000]}"
            self._waiter.wait(min(left, 0.2))
            self.pending += self.receive()

    def receive(self) -> list[Any]:
        return list(self.link.recv())


class FakeScheduler(Inbox):
    """The back end of a scheduler, for tests of a worker."""

    def __init__(self, address: str, epoch: int = 1) -> None:
        self.router = RouterLink(back(address))
        self.epoch = epoch
        super().__init__(self.router)

    def expect(self, kind: type[M], worker: bytes | None = None) -> tuple[bytes, M]:
        """The next message of a kind, and who sent it."""
        found: tuple[bytes, M] = self.wait_for(lambda item: isinstance(item[1], kind) and worker in (None, item[0]))
        return found

    def welcome(self, engine: EngineConfig, model: ModelInfo = MODEL) -> tuple[bytes, Hello]:
        """Waits for a worker's Hello and answers it."""
        worker, hello = self.expect(Hello)
        self.send(worker, Welcome(epoch=self.epoch, engine=engine, model=model))
        return worker, hello

    def assign(self, worker: bytes, epoch: int) -> None:
        self.send(worker, Assign(group=0, epoch=epoch, rank=0, world_size=1))

    def send(self, worker: bytes, message: Message) -> None:
        assert self.router.send(worker, message)

    def close(self) -> None:
        self.router.close()


class FakePeer(Inbox):
    """An api, tokenizer or worker that a test drives. It says Hello by itself whenever it connects or is Unknown.

    With `beating` it keeps its heartbeats up while it waits.
    """

    def __init__(
        self,
        address: str,
        role: str,
        *,
        loaded: str = "",
        own_address: str = "",
        beating: bool = True,
        identity: bytes = b"",
    ) -> None:
        self.identity = identity or new_identity()
        self.role = role
        self.beating = beating
        self.hello = Hello(
            role=role, name=f"{role}:test", address=own_address, loaded=loaded, instance=self.identity.decode()
        )
        self.dealer = DealerLink(back(address) if role == "worker" else front(address), self.identity)
        self._next_beat = 0.0
        super().__init__(self.dealer)

    def receive(self) -> list[Any]:
        items = self.dealer.recv()
        for item in items:
            if item is Link.UP or isinstance(item, Unknown):
                self.dealer.send(self.hello)
        if self.beating and time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + 0.5
            self.dealer.send(Heartbeat(epoch=0))
        return [item for item in items if not isinstance(item, Heartbeat)]

    def expect(self, kind: type[M], wanted: Callable[[M], bool] = lambda message: True) -> M:
        """The next message of a kind."""
        found: M = self.wait_for(lambda item: isinstance(item, kind) and wanted(item))
        return found

    def send(self, message: Message) -> None:
        assert self.dealer.send(message)

    def close(self) -> None:
        self.dealer.close()
