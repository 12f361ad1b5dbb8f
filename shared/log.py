"""Logging to stderr: `12:34:56 scheduler[pid] INFO message`."""

from __future__ import annotations

import logging
import os
import sys

LEVEL_VARIABLE = "PAGEBUS_LOG_LEVEL"


def setup(service: str) -> None:
    """Sends this process's logs to stderr under the service's name; the level is PAGEBUS_LOG_LEVEL, or INFO."""
    level = logging.getLevelNamesMapping().get(os.environ.get(LEVEL_VARIABLE, "INFO").upper(), logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    name = service.replace("%", "%%")
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s {name}[%(process)d] %(levelname)s %(message)s", datefmt="%H:%M:%S")
    )
    logging.basicConfig(level=level, handlers=[handler], force=True)


def fail(error: Exception) -> None:
    """Tells the operator on stderr, in one line, why the process cannot start."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
