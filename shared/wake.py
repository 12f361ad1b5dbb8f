"""Waking a poll loop from another thread or by a signal."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


class Wake:
    """A pipe whose reading end, `fd`, a poller watches."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write, False)

    def set(self) -> None:
        """Wakes the poller. Callable from any thread and from a signal handler."""
        try:
            os.write(self._write, b"\0")
        except BlockingIOError:
            return  # full of earlier wake-ups

    def clear(self) -> None:
        """Takes the pending wake-ups; look for what they announced after this, not before."""
        try:
            while len(os.read(self.fd, 4096)) == 4096:
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        """Closes both ends."""
        os.close(self.fd)
        os.close(self._write)


def on_stop(stop: Callable[[], None]) -> None:
    """Calls `stop` on SIGTERM and SIGINT. For the main thread."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop())
