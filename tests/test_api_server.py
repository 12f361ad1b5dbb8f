"""`python -m services.api` as a process: its flags, its socket, its end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from shared.config import EngineConfig
from shared.errors import EXIT_CONFIG
from tests.api_server import Scheduler, answer, parse_events
from tests.engine_fakes import FakeTokenizer

PATIENCE = 30.0


def api_process(*flags: str, fds: tuple[int, ...] = (), env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "services.api", *flags]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, pass_fds=fds, env=os.environ | (env or {}))


def refused(*flags: str) -> str:
    """The one line of a process that does not start."""
    began = time.monotonic()
    process = api_process(*flags)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == EXIT_CONFIG
    assert time.monotonic() - began < 15
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    return lines[0]


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused("--scheduler", f"ipc://{tmp_path}", "--host", "127.0.0.1", "--port", str(port))
    assert f"127.0.0.1:{port}" in line
    assert "in use" in line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--scheduler", "ipc:///tmp/x", "--port", "70000"], "70000"),
        (["--scheduler", "ipc:///tmp/x", "--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["--scheduler", "ipc:///tmp/x", "--fd", "77"], "--fd 77"),
        ([], "--scheduler"),
        (["--scheduler", "ipc:///tmp/x", "--prot", "1"], "--port"),
        (["--scheduler", "http://x", "--port", "0", "--host", "127.0.0.1"], "http://x"),
    ],
)
def test_mistakes_are_one_line(flags: list[str], words: str) -> None:
    assert words in refused(*flags)


class Running:
    """An api process that inherited its socket, before a small engine."""

    def __init__(self, folder: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        address = f"ipc://{folder}"
        self.tokenizer = FakeTokenizer(f"{address}/tok")
        self.scheduler = Scheduler(address, answer, [self.tokenizer], engine=EngineConfig(served_model_name=["m"]))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            fd = listener.fileno()
            common = ("--scheduler", address, "--fd", str(fd), *flags)
            self.processes = [api_process(*common, fds=(fd,), env=env) for _ in range(2 if env else 1)]
        self.process = self.processes[0]

    def wait_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                assert self.process.poll() is None
            time.sleep(0.05)
        raise AssertionError("not ready")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        self.scheduler.kill()
        self.tokenizer.kill()


@contextmanager
def running(folder: Path, *flags: str, env: dict[str, str] | None = None) -> Iterator[Running]:
    api = Running(folder, *flags, env=env)
    try:
        api.wait_ready()
        yield api
    finally:
        api.close()


async def read_stream(url: str, body: dict[str, object]) -> list[str]:
    async with (
        httpx.AsyncClient(timeout=PATIENCE) as client,
        client.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as response,
    ):
        return parse_events((await response.aread()).decode())


async def ended(process: subprocess.Popen[str]) -> int:
    return await asyncio.to_thread(process.wait, PATIENCE)


async def test_sigterm_lets_streams_finish(tmp_path: Path) -> None:
    with running(tmp_path) as api:
        api.scheduler.set(allowed=2)
        stream = asyncio.create_task(read_stream(api.url, {"prompt": "x", "max_tokens": 30}))
        await api.scheduler.until(lambda: bool(api.scheduler.running))
        api.process.send_signal(signal.SIGTERM)
        await until_refused(api.url)
        assert not stream.done()
        api.scheduler.set(allowed=1 << 30)
        events = await stream
        assert events[-1] == "[DONE]"
        assert "error" not in events[-2]
        assert await ended(api.process) == 0


async def until_refused(url: str) -> None:
    """Until nobody listens any more."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                await asyncio.to_thread(httpx.get, f"{url}/health")
            except httpx.TransportError:
                return


async def test_streams_that_take_too_long_are_cut_with_an_error(tmp_path: Path) -> None:
    with running(tmp_path, "--shutdown-timeout", "0.5") as api:
        api.scheduler.set(allowed=2)
        stream = asyncio.create_task(read_stream(api.url, {"prompt": "x", "max_tokens": 30}))
        await api.scheduler.until(lambda: bool(api.scheduler.running))
        await asyncio.sleep(0.6)  # by then the stream is open
        api.process.send_signal(signal.SIGTERM)
        *_, error, done = await stream
        assert "shutting down" in error
        assert done == "[DONE]"
        assert await ended(api.process) == 0


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with running(tmp_path, "--shutdown-timeout", "60") as api:
        api.scheduler.set(allowed=0)
        stream = asyncio.create_task(read_stream(api.url, {"prompt": "x"}))
        await api.scheduler.until(lambda: bool(api.scheduler.running))
        api.process.send_signal(signal.SIGINT)
        await until_refused(api.url)
        began = time.monotonic()
        api.process.send_signal(signal.SIGINT)
        assert await ended(api.process) == 0
        assert time.monotonic() - began < 5
        await asyncio.gather(stream, return_exceptions=True)


async def test_idle_connections_are_kept_and_then_closed(tmp_path: Path) -> None:
    with running(tmp_path, "--keep-alive-timeout", "2") as api:
        port = int(api.url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(1)
        began = time.monotonic()
        assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
        assert time.monotonic() - began > 0.5
        writer.close()


async def test_several_processes_add_up_their_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    with running(tmp_path, env={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics")}) as api:
        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(read_stream(api.url, {"prompt": "x", "max_tokens": 4}))
        page = httpx.get(f"{api.url}/metrics").text.splitlines()
        counts = [line.split()[-1] for line in page if line.startswith("vllm:e2e_request_latency_seconds_count")]
        assert counts == ["20.0"]
        running_now = [line for line in page if line.startswith("vllm:num_requests_running{")]
        assert len(running_now) == 1
        assert [line for line in page if line.startswith("vllm:time_per_output_token_seconds_count")]
