"""`python -m services.tokenizer --scheduler ADDRESS`"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import msgspec

from shared import bus, log
from shared.errors import EXIT_CONFIG, StartupError
from shared.flags import option, parse
from shared.phases import Phases
from shared.wake import on_stop


class TokenizerConfig(msgspec.Struct, kw_only=True):
    """A tokenizer's own flags; all else comes from the scheduler."""

    scheduler: Annotated[str, option("Tokenizer", "the scheduler's address, tcp://host:port or ipc:///folder")] = ""


def main(argv: Sequence[str]) -> int:
    """Runs a tokenizer; returns the exit code."""
    log.setup("tokenizer")
    (config,) = parse([TokenizerConfig], argv, prog="python -m services.tokenizer")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # replicas are the parallelism; the cores are shared
    from services.tokenizer.loading import avoid_torch
    from services.tokenizer.server import TokenizerServer

    avoid_torch()
    phases = Phases()
    phases.end("imports")
    try:
        server = TokenizerServer(config.scheduler, phases)
    except StartupError as error:
        log.fail(error)
        return EXIT_CONFIG
    on_stop(server.stop)
    return server.run()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    bus.finish()
    logging.shutdown()
    os._exit(code)  # a thread may be deep in native code
