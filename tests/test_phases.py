"""The phases of a start add up to the life of the process."""

from __future__ import annotations

import re
import subprocess
import sys
import time

from shared.phases import age

PROBE = """
import time
from shared.phases import Phases
phases = Phases()
phases.end("imports")
until = time.process_time() + 0.2
while time.process_time() < until: pass
phases.end("work")
time.sleep(0.3)
phases.end("rest")
print(phases)
"""


def test_phases_of_a_process() -> None:
    began = time.monotonic()
    text = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True).stdout
    lived = time.monotonic() - began
    found = re.fullmatch(
        r"(\S+) s, (\S+) s of CPU: imports (\S+) \((\S+)\), work (\S+) \((\S+)\), rest (\S+) \((\S+)\)\n", text
    )
    assert found, text
    wall, cpu, imports, imports_cpu, work, work_cpu, rest, rest_cpu = map(float, found.groups())
    assert abs(imports + work + rest - wall) < 0.02
    assert abs(imports_cpu + work_cpu + rest_cpu - cpu) < 0.02
    assert imports_cpu > 0
    assert 0.2 <= work_cpu < 0.25
    assert work >= 0.2
    assert rest >= 0.3
    assert rest_cpu < 0.05
    assert 0.5 < wall <= lived + 0.02


def test_the_age_grows_with_the_clock() -> None:
    first, began = age(), time.monotonic()
    time.sleep(0.05)
    assert abs(age() - first - (time.monotonic() - began)) < 0.02
    assert first > 0.01
