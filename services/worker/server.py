"""A worker on the bus: the I/O thread, which talks to the scheduler while `Compute` loads and runs the model."""

from __future__ import annotations

import logging
import os
import socket
import time

from services.worker.compute import Compute, Crash, Load, Place
from shared.addresses import back
from shared.bus import DealerLink, Link, Waiter, new_identity
from shared.errors import EXIT_CONFIG, StartupError
from shared.liveness import Membership
from shared.log import fail
from shared.messages import Assign, Goodbye, Hello, Message, Plan, Reset, Unknown, Welcome
from shared.wake import Wake

log = logging.getLogger(__name__)

FAREWELL_SECONDS = 1.0  # for the last messages to leave


class Worker:
    """One rank. It outlives schedulers: when one is gone, the weights stay, the slots go."""

    def __init__(self, scheduler: str, load: Load) -> None:
        identity = new_identity()
        hello = Hello(role="worker", name=f"{socket.gethostname()}:{os.getpid()}", instance=identity.decode())
        self._wake = Wake()
        self._link = DealerLink(back(scheduler), identity)
        self._waiter = Waiter(self._link, fds=[self._wake.fd])
        self._membership = Membership(hello, time.monotonic())
        self._compute = Compute(load, self._wake)
        self._welcome: Welcome | None = None
        self._stopping = False
        self._exit: int | None = None

    def stop(self) -> None:
        """Makes `run` return soon; for signal handlers and other threads."""
        self._stopping = True
        self._wake.set()

    def run(self) -> int:
        """Serves until stopped or failed; returns the exit code."""
        self._compute.start()
        log.info("connecting to the scheduler at %s", self._link.address)
        while self._exit is None and not self._stopping:
            ready = self._waiter.until(self._membership.wake_at)
            if self._wake.fd in ready:
                self._wake.clear()
            if self._link in ready:
                for event in self._link.recv():
                    self._receive(event)
            for done in self._compute.take():
                self._finish(done)
            self._say(self._membership.tick(time.monotonic()))
        self._link.send(Goodbye())
        self._link.flush(FAREWELL_SECONDS)
        return self._exit or 0

    def _receive(self, event: Message | Link) -> None:
        now = time.monotonic()
        self._membership.heard(now)
        match event:
            case Plan():
                if event.epoch == self._compute.epoch:
                    self._compute.put(event)
            case Reset():
                self._void(event.epoch)
                self._compute.put(event)
            case Assign():
                self._assigned(event)
            case Welcome():
                self._membership.welcome(event)
                self._welcome = event
                self._void()
            case Unknown():
                self._void()
                self._say(self._membership.unknown())
            case Goodbye():
                log.error("the scheduler gave this worker up: a step took too long")
                self._exit = 1
            case Link.UP:
                self._say(self._membership.connected(now))
            case Link.DOWN:
                log.warning("the scheduler is gone; waiting for it, keeping the weights")
                self._void()
                self._membership.disconnected()

    def _assigned(self, assign: Assign) -> None:
        if self._welcome is None:
            return
        log.info("rank %d of %d in group %d", assign.rank, assign.world_size, assign.group)
        self._void(assign.epoch)
        self._compute.put(Place(self._welcome.engine, self._welcome.model, assign))

    def _void(self, epoch: int = 0) -> None:
        """From now on only plans of this group epoch count."""
        self._compute.epoch = epoch

    def _finish(self, done: Message | Crash) -> None:
        if not isinstance(done, Crash):
            self._membership.hello.loaded = self._compute.loaded
            self._say([done])
        elif isinstance(done.error, StartupError):
            fail(done.error)
            self._exit = EXIT_CONFIG
        else:
            self._exit = 1

    def _say(self, messages: list[Message]) -> None:
        for message in messages:
            self._link.send(message)  # a lost one does not matter: losing the link voids all of it
