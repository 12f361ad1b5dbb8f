"""A server as a child process: started, awaited, accounted for with all its processes, and ended with all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from bench import processes

POLL = 0.02  # seconds between looks at /health
GRACE = 20.0  # seconds from SIGTERM to SIGKILL
LOG_LINES = 15  # shown when it does not start


class Server:
    """Runs `command` while the context lasts, whose `{port}` becomes a free port.

    `ready` is the time in seconds from the command to the first 200 of /health. Raises RuntimeError with the end of
    its log when it ends before that or takes longer than `limit` seconds.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, limit: float = 600
    ) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.ready = 0.0
        self._command = [word.replace("{port}", self.url.rpartition(":")[2]) for word in command]
        self._environment = dict(environment or {})
        self._limit = limit

    def __enter__(self) -> Server:
        self._log = tempfile.NamedTemporaryFile("r", prefix="bench-", suffix=".log", errors="replace")
        began = time.perf_counter()
        with open(self._log.name, "w") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | self._environment,
                start_new_session=True,
            )
        try:
            while not self._healthy():
                if self._process.poll() is not None:
                    raise RuntimeError(f"ended with {self._process.returncode} before it was ready:\n{self.log()}")
                if time.perf_counter() - began > self._limit:
                    raise RuntimeError(f"not ready after {self._limit:.0f} s:\n{self.log()}")
                time.sleep(POLL)
        except BaseException:
            self.close()
            raise
        self.ready = time.perf_counter() - began
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _healthy(self) -> bool:
        try:
            with urlopen(f"{self.url}/health", timeout=10) as answer:
                return bool(answer.status == 200)
        except HTTPError as error:
            error.close()
            return False
        except (URLError, OSError):
            return False

    def log(self) -> str:
        """The last lines of what it printed."""
        return "\n".join(Path(self._log.name).read_text(errors="replace").splitlines()[-LOG_LINES:])

    def pids(self) -> list[int]:
        """Its processes just now, itself first."""
        return processes.session(self._process.pid)

    def close(self) -> None:
        """Ends all its processes; those that do not go within 20 s are killed."""
        everyone = self.pids()
        _signal([self._process.pid], signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE)
        _signal(set(everyone) | set(self.pids()), signal.SIGKILL)
        self._process.wait()
        self._log.close()


def _signal(pids: Sequence[int] | set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
