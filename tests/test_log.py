"""The log's format and level."""

from __future__ import annotations

import os
import re
import subprocess
import sys

PROGRAM = """
import logging
from shared import log
log.setup("100% scheduler")
logging.getLogger("x").info("peer %s", "a")
logging.getLogger("x").debug("hidden")
log.fail(ValueError("two\\nlines"))
"""


def stderr_of(program: str, **env: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=os.environ | env, check=True
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


def test_lines_name_time_service_pid_and_level() -> None:
    _, text = stderr_of(PROGRAM)
    first, second = text.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d 100% scheduler\[\d+\] INFO peer a", first)
    assert second == "error: two lines"


def test_the_level_is_read_from_the_environment() -> None:
    assert "DEBUG hidden" in stderr_of(PROGRAM, PAGEBUS_LOG_LEVEL="debug")[1]
    assert "INFO" not in stderr_of(PROGRAM, PAGEBUS_LOG_LEVEL="warning")[1]
    assert "INFO" in stderr_of(PROGRAM, PAGEBUS_LOG_LEVEL="nonsense")[1]
