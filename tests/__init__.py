"""Tests, one file per module; shared helpers are imported as `tests.<helper>`."""
