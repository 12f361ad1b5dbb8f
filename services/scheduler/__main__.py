"""`python -m services.scheduler --bind ADDRESS [engine flags]`"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Annotated

import msgspec

from services.scheduler.server import Server
from shared import log
from shared.config import EngineConfig
from shared.errors import EXIT_CONFIG, StartupError
from shared.flags import option, parse
from shared.garbage import settle
from shared.model_info import read_model_info
from shared.phases import Phases
from shared.wake import on_stop


class BindConfig(msgspec.Struct, kw_only=True):
    """The scheduler's own flag; all others are the engine's."""

    bind: Annotated[str, option("Scheduler", "where to listen: tcp://host:port (and port + 1) or ipc:///folder")] = ""


def main(argv: Sequence[str]) -> int:
    """Runs the scheduler; returns the exit code."""
    log.setup("scheduler")
    phases = Phases()
    place, engine = parse([BindConfig, EngineConfig], argv, prog="python -m services.scheduler")
    phases.end("imports")
    try:
        model = read_model_info(engine)
        phases.end("model files")
        server = Server(place.bind, engine, model)
    except StartupError as error:
        log.fail(error)
        return EXIT_CONFIG
    phases.end("bind")
    logging.getLogger(__name__).info("started in %s", phases)
    on_stop(server.stop)
    settle()
    server.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
