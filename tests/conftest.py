"""Settings of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Time limits live in benchmarks: a busy machine must not fail a test.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
