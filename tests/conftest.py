"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Time limits live in benchmarks: a busy machine must not fail a test. CI repeats the same examples, so that what it
# says depends on the change alone; everybody else's runs look for new ones.
settings.register_profile(
    "pagebus", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("pagebus")
