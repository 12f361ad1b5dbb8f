"""Keeps a set of child processes running: names the dead, restarts them with back-off, ends them in order.

A child that exits with `EXIT_CONFIG` cannot be helped by a restart: it ends the whole run. No child outlives the
supervisor: on Linux the kernel kills it (PR_SET_PDEATHSIG) even when the supervisor itself is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from shared.errors import EXIT_CONFIG

STABLE_SECONDS = 10.0  # a child that ran this long starts its back-off anew
LONGEST_BACKOFF = 10.0  # seconds
STARTUP_TRIES = 3  # deaths in a row of a child that never became part of a ready server
KILL_AFTER = 3.0  # seconds from SIGTERM to SIGKILL

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@dataclass
class Child:
    """One supervised process: its command and how it has fared."""

    name: str  # "worker 0"
    command: Sequence[str]
    fds: Sequence[int] = ()
    stop_order: int = 0  # lower ones are asked to end first
    grace: float = KILL_AFTER  # seconds it may take to end by itself
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    deaths: int = 0  # in a row
    restart_at: float = 0.0

    @property
    def running(self) -> bool:
        return self.process is not None


def backoff(deaths: int) -> float:
    """Seconds to wait before the restart after `deaths` deaths in a row: 0, 0.2, 0.4, ... `LONGEST_BACKOFF`."""
    return 0.0 if deaths <= 1 else min(LONGEST_BACKOFF, 0.1 * 2 ** min(deaths - 1, 20))


def describe_exit(code: int) -> str:
    """What a wait status of Popen says, for people: "killed by SIGKILL" or "exit code 1"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


@dataclass
class Supervisor:
    """Starts the children and keeps them running until a signal or a misconfigured child ends the run."""

    children: list[Child]
    say: Callable[[str], None]
    ready: bool = False  # set by the owner once the whole server has been up
    _stop: int = field(default=0, init=False)  # how many times a stop was asked for
    _code: int = field(default=0, init=False)
    _wake: tuple[socket.socket, socket.socket] | None = field(default=None, init=False)

    def run(self, on_tick: Callable[[], float]) -> int:
        """Runs until stopped; returns the exit code. `on_tick` is called in between; it returns seconds to its next."""
        with self._signals():
            try:
                for child in self.children:
                    self._start(child)
                while not self._stop:
                    self._reap()
                    self._restart_due()
                    if not self._stop:
                        self._wait(min(on_tick(), self._until_restart()))
            finally:
                self._end_all()
        return self._code

    def stop(self, code: int = 0) -> None:
        """Asks the run to end with this exit code; a second time, at once."""
        self._stop += 1
        self._code = self._code or code

    def _start(self, child: Child) -> None:
        child.process = subprocess.Popen(
            child.command,
            pass_fds=child.fds,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which ends the children in order
            preexec_fn=_die_with_parent if _libc else None,
        )
        child.started = time.monotonic()
        child.restart_at = 0.0

    def _reap(self) -> None:
        for child in self.children:
            if child.process is None or (code := child.process.poll()) is None:
                continue
            pid, child.process = child.process.pid, None
            self._bury(child, pid, code)

    def _bury(self, child: Child, pid: int, code: int) -> None:
        if code == EXIT_CONFIG:
            self.stop(EXIT_CONFIG)  # the child has said why, in one line
            return
        now = time.monotonic()
        child.deaths = 1 if now - child.started >= STABLE_SECONDS else child.deaths + 1
        text = f"{child.name} (pid {pid}) ended: {describe_exit(code)}"
        if not self.ready and child.deaths >= STARTUP_TRIES:
            self.say(f"{text}; giving up after {child.deaths} failed starts")
            self.stop(1)
            return
        wait = backoff(child.deaths)
        self.say(f"{text}; restarting " + (f"in {wait:.1f} s" if wait else "now"))
        child.restart_at = now + wait

    def _restart_due(self) -> None:
        now = time.monotonic()
        for child in self.children:
            if not child.running and child.restart_at <= now and not self._stop:
                self._start(child)

    def _until_restart(self) -> float:
        waiting = [child.restart_at for child in self.children if not child.running]
        return max(0.0, min(waiting) - time.monotonic()) if waiting else 3600.0

    def _end_all(self) -> None:
        """SIGTERM in stop order, each order given its grace, then SIGKILL; at once when a stop is asked for twice."""
        for order in sorted({child.stop_order for child in self.children}):
            batch = [child for child in self.children if child.stop_order == order and child.running]
            for child in batch:
                _signal(child, signal.SIGTERM)
            deadline = time.monotonic() + max((child.grace for child in batch), default=0.0)
            while any(_alive(child) for child in batch) and time.monotonic() < deadline and self._stop < 2:
                self._wait(deadline - time.monotonic())
            for child in batch:
                if _alive(child):
                    _signal(child, signal.SIGKILL)
            for child in batch:
                assert child.process is not None
                child.process.wait()
                child.process = None

    def _wait(self, seconds: float) -> None:
        """Sleeps until a signal (a child's death included) or for `seconds`."""
        assert self._wake is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake[0], selectors.EVENT_READ)
            selector.select(max(0.0, seconds))
        with contextlib.suppress(BlockingIOError):
            self._wake[0].recv(4096)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM stop the run, SIGCHLD wakes it; the former handlers come back at the end."""
        self._wake = socket.socketpair()
        for end in self._wake:
            end.setblocking(False)
        old_fd = signal.set_wakeup_fd(self._wake[1].fileno(), warn_on_full_buffer=False)
        stoppers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        old = {number: signal.signal(number, lambda *_: self.stop()) for number in stoppers}
        old[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        try:
            yield
        finally:
            signal.set_wakeup_fd(old_fd)
            for number, handler in old.items():
                signal.signal(number, handler)
            for end in self._wake:
                end.close()


def _die_with_parent() -> None:
    assert _libc is not None
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # the parent died before the call
        os._exit(1)


def _alive(child: Child) -> bool:
    return child.process is not None and child.process.poll() is None


def _signal(child: Child, number: signal.Signals) -> None:
    if child.process is not None:
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(number)
