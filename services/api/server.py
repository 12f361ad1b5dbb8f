"""The api process: its flags, its socket, its life from start to the last stream."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import msgspec
import uvicorn

from services.api.app import build_app
from services.api.gateway import Gateway
from shared.api_config import ApiConfig
from shared.engine import EngineClient
from shared.errors import EXIT_CONFIG, StartupError
from shared.flags import option, parse
from shared.garbage import settle
from shared.listener import listen
from shared.log import fail, setup
from shared.phases import Phases

log = logging.getLogger(__name__)
LAST_WORDS_SECONDS = 1.0  # for the error events of streams that are cut off


class LaunchConfig(msgspec.Struct, kw_only=True):
    """Where this process finds the engine, and its socket if it inherits one."""

    scheduler: Annotated[str, option("Process", "address of the scheduler: tcp://host:port or ipc:///folder")] = ""
    fd: Annotated[int, option("Process", "listening socket to inherit, instead of --host and --port")] = -1


class Server(uvicorn.Server):
    """uvicorn, with its signals left to `serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    launch, config = parse([LaunchConfig, ApiConfig], words, prog="python -m services.api")
    setup("api")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    try:
        if not launch.scheduler:
            raise StartupError("--scheduler is required: tcp://host:port or ipc:///folder")
        listener = _inherit(launch.fd) if launch.fd >= 0 else listen(config.host, config.port)
        with listener, asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve(launch.scheduler, config, listener))
    except StartupError as error:
        fail(error)
        return EXIT_CONFIG
    return 0


def _inherit(fd: int) -> socket.socket:
    try:
        return socket.socket(fileno=fd)
    except OSError as error:
        raise StartupError(f"--fd {fd} is not a socket: {error.strerror}") from None


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


async def serve(scheduler: str, config: ApiConfig, listener: socket.socket) -> None:
    """Serves on the socket until a signal.

    The first signal lets running requests go on for `shutdown_timeout` seconds, the second ends them at once.
    """
    phases = Phases()
    phases.end("imports")
    engine = EngineClient(scheduler)
    gateway = Gateway(engine, config)
    server = make_server(gateway)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if gateway.draining:
            server.force_exit = True
            gateway.close()
            return
        log.info("stopping; running requests have %g s", config.shutdown_timeout)
        gateway.drain()
        server.should_exit = True
        loop.call_later(config.shutdown_timeout, gateway.close)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await engine.start()
    settle()
    try:
        host, port = listener.getsockname()[:2]
        phases.end("gateway")
        log.info("listening on %s:%s, started in %s", host, port, phases)
        await server.serve(sockets=[listener])
    finally:
        await engine.close()


def make_server(gateway: Gateway) -> Server:
    """uvicorn for the gateway; to be run with `serve(sockets=[...])`."""
    config = gateway.config
    return Server(
        uvicorn.Config(
            build_app(gateway),
            http="auto",
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            backlog=2048,
            timeout_keep_alive=config.keep_alive_timeout,
            timeout_graceful_shutdown=int(config.shutdown_timeout + LAST_WORDS_SECONDS) + 1,
        )
    )
