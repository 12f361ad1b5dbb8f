"""`python -m services.worker --scheduler ADDRESS`"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import msgspec

from services.worker.null import NullEngine
from services.worker.server import Worker
from shared import bus, log
from shared.errors import EXIT_CONFIG, StartupError
from shared.flags import option, parse
from shared.phases import Phases
from shared.wake import on_stop


class WorkerConfig(msgspec.Struct, kw_only=True):
    """A worker's own flags; all else comes from the scheduler."""

    scheduler: Annotated[str, option("Worker", "the scheduler's address, tcp://host:port or ipc:///folder")] = ""
    null: Annotated[bool, option("Worker", "answer at once with meaningless tokens, without a model", hidden=True)] = (
        False
    )
    null_step_ms: Annotated[float, option("Worker", "with --null: how long a step takes", hidden=True, ge=0)] = 0.0


def main(argv: Sequence[str]) -> int:
    """Runs a worker; returns the exit code."""
    log.setup("worker")
    (config,) = parse([WorkerConfig], argv, prog="python -m services.worker")
    try:
        if config.null:
            worker = Worker(config.scheduler, partial(NullEngine, step_seconds=config.null_step_ms / 1000))
        else:
            from services.worker.load import load

            phases = Phases()
            phases.end("imports")
            worker = Worker(config.scheduler, partial(load, phases=phases))
    except StartupError as error:
        log.fail(error)
        return EXIT_CONFIG
    on_stop(worker.stop)
    return worker.run()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    bus.finish()
    logging.shutdown()
    os._exit(code)  # the compute thread may be deep in native code; waiting for it or unwinding it could hang
