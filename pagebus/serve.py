"""`pagebus serve`: all processes of a server on this machine, started and supervised.

The port is bound and the model found before anything is started, so that a mistake costs a second and one line.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from pagebus.supervisor import KILL_AFTER, Child, Supervisor
from shared.api_config import ApiConfig
from shared.config import EngineConfig
from shared.errors import EXIT_CONFIG, StartupError
from shared.flags import option, parse, to_argv
from shared.hub import resolve
from shared.listener import listen
from shared.model_info import read_model_info
from shared.phases import age

POLL_SECONDS = 0.1  # between looks at /health while starting


class ServeConfig(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How many processes of each kind to run, and where they meet."""

    tokenizers: Annotated[int, option("Processes", "tokenizer processes", ge=1, le=256)] = 1
    workers: Annotated[int, option("Processes", "worker processes, each with the whole model", ge=1, le=256)] = 1
    api_replicas: Annotated[int, option("Processes", "HTTP processes sharing the port", ge=1, le=256)] = 1
    bus: Annotated[
        str, option("Processes", "address of the bus, such as tcp://10.0.0.1:5700, when other machines are to join in")
    ] = ""


def run(argv: Sequence[str]) -> int:
    """Serves until stopped; returns the exit code."""
    engine, serve, api = parse(
        [EngineConfig, ServeConfig, ApiConfig],
        argv,
        prog="pagebus serve",
        description="Serve a model behind the OpenAI REST API on this machine.",
        positional="model",
    )
    try:
        with listen(api.host, api.port) as listener:  # before all else: a port in use shows at once
            listener.set_inheritable(True)
            prepare(engine, serve)
            return _serve(engine, api, serve, listener)
    except StartupError as error:
        print(f"pagebus serve: {error}", file=sys.stderr)
        return EXIT_CONFIG


def prepare(engine: EngineConfig, serve: ServeConfig) -> None:
    """Finds the model and checks what can be checked without loading it. Raises StartupError."""
    names = engine.names
    path = resolve(engine.model, engine.revision)
    read_model_info(engine)
    engine.model, engine.served_model_name = str(path), names
    engine.local_workers = serve.workers


def _serve(engine: EngineConfig, api: ApiConfig, serve: ServeConfig, listener: socket.socket) -> int:
    folder = Path(tempfile.mkdtemp(prefix="pagebus-"))  # mode 0700
    try:
        address = serve.bus or f"ipc://{folder}"
        if serve.api_replicas > 1:
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder / "metrics")
            (folder / "metrics").mkdir()
        children = make_children(engine, api, serve, address, listener.fileno())
        supervisor = Supervisor(children, say)
        startup = Startup(listener.getsockname(), api, engine.names[0])
        kinds = f"1 scheduler, {serve.workers} worker(s), {serve.tokenizers} tokenizer(s), {serve.api_replicas} api"
        say(f"serving {engine.names[0]} ({engine.model}): {kinds}")

        def tick() -> float:
            if not supervisor.ready:
                supervisor.ready = startup.look()
            return 3600.0 if supervisor.ready else POLL_SECONDS

        return supervisor.run(tick)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_children(engine: EngineConfig, api: ApiConfig, serve: ServeConfig, address: str, fd: int) -> list[Child]:
    """The children of a server, api processes last: they are the first to be ended."""

    def service(name: str, *flags: str) -> list[str]:
        return [sys.executable, "-m", f"services.{name}", *flags]

    place = ("--scheduler", address)
    api_flags = [word for word in to_argv(api) if not word.startswith(("--host=", "--port="))]
    children = [Child("scheduler", service("scheduler", "--bind", address, *to_argv(engine)), stop_order=1)]
    children += [Child(f"worker {i}", service("worker", *place), stop_order=1) for i in range(serve.workers)]
    children += [Child(f"tokenizer {i}", service("tokenizer", *place), stop_order=1) for i in range(serve.tokenizers)]
    grace = api.shutdown_timeout + KILL_AFTER
    for i in range(serve.api_replicas):
        command = service("api", *place, "--fd", str(fd), *api_flags)
        children.append(Child(f"api {i}", command, fds=(fd,), stop_order=0, grace=grace))
    return children


@dataclass
class Startup:
    """Watches /health while the server comes up; the processes log their own progress."""

    address: tuple[str, int]
    api: ApiConfig
    model: str

    def look(self) -> bool:
        """Whether the server is ready; then prints how to use it."""
        from shared.healthcheck import http_ok  # imported while the children start, not before

        if http_ok(self.address[1], _reachable(self.address[0])):
            self._welcome()
            return True
        return False

    def _welcome(self) -> None:
        host = _reachable(self.address[0])
        url = f"http://{f'[{host}]' if ':' in host else host}:{self.address[1]}"
        body = json.dumps({"model": self.model, "messages": [{"role": "user", "content": "Say hi."}]})
        key = " -H 'Authorization: Bearer YOUR-KEY'" if self.api.api_key else ""
        say(f"ready in {age():.1f} s at {url}")
        print(
            f"\n  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'\n"
            f"  pagebus chat --url {url}\n",
            flush=True,
        )


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def say(text: str) -> None:
    """One line of the launcher's own."""
    print(f"pagebus: {text}", flush=True)
