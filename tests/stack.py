"""A whole server for tests: `pagebus serve` as a real process, its children by kind, and a small HTTP client."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

READY_SECONDS = 120.0


class Stack:
    """A running `pagebus serve`. Use as a context manager."""

    def __init__(self, *flags: str, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "pagebus", "serve", "--host", "127.0.0.1", "--port", "0", *flags]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )
        self.lines: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if found := re.search(r"ready in .* at (http://\S+)", line):
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    def __enter__(self) -> Stack:
        assert self._ready.wait(READY_SECONDS), f"not ready:\n{self.log()}"
        assert self.url, f"ended while starting:\n{self.log()}"
        self.http = httpx.Client(base_url=self.url, timeout=120)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.stop()

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"did not end within 30 s of SIGTERM:\n{self.log()}") from None
        self._reader.join(10)
        return code

    def log(self) -> str:
        return "\n".join(self.lines[-60:])

    def pids(self, kind: str) -> list[int]:
        """Process ids of the children running `services.{kind}`, oldest first."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                    parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                    if parent == self.process.pid and f"services.{kind}".encode() in words:
                        found.append(int(folder.name))
        return sorted(found)

    def kill(self, kind: str) -> int:
        """SIGKILL to the first process of a kind; its pid."""
        pid = self.pids(kind)[0]
        os.kill(pid, signal.SIGKILL)
        return pid

    def metric(self, name: str) -> float:
        """The sum over all label sets of a metric."""
        values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", self.http.get("/metrics").text, re.M)
        assert values, f"no metric {name}"
        return sum(map(float, values))

    def wait_idle(self) -> None:
        """Until no request runs or waits and no KV block is in use."""
        wait_until(
            lambda: (
                not any(
                    self.metric(f"vllm:{name}")
                    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
                )
            )
        )


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Polls a condition of a process that sends no event; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.05)


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[Stack]:
    with Stack(*flags) as stack:
        yield stack
