"""Choosing an executor."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from services.worker import backends
from services.worker.backends import compute_threads, make_executor, native_unavailable
from shared.config import EngineConfig
from shared.errors import StartupError
from shared.model_info import ModelInfo
from tests.dense import make_spec

INFO = ModelInfo(path="", architecture="Test", vocab_size=97, max_model_len=64, eos_token_ids=[], dtype="float32")


def made(backend: Any) -> str:
    """Name of the executor made for `--backend backend`."""
    threads = torch.get_num_threads()
    try:
        return make_executor(make_spec(), EngineConfig(backend=backend, threads=1), INFO).backend
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "NATIVE", "services.worker.no_such_module")


def test_reference_on_request() -> None:
    assert made("reference") == "reference"


@pytest.mark.usefixtures("absent")
def test_auto_falls_back_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert made("auto") == "reference"
    (message,) = caplog.messages
    assert "not installed" in message


@pytest.mark.usefixtures("absent")
def test_cpu_that_cannot_run_is_an_error() -> None:
    with pytest.raises(StartupError, match="--backend cpu cannot run here: it is not installed; use --backend"):
        made("cpu")


@pytest.mark.skipif(native_unavailable() is not None, reason="no native backend here")
@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_native_where_it_runs(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert made(backend) == "cpu"
    assert not caplog.messages


def test_threads_are_shared_among_the_local_workers() -> None:
    alone = compute_threads(EngineConfig())
    assert alone >= 1
    assert compute_threads(EngineConfig(local_workers=alone)) == 1
    assert compute_threads(EngineConfig(local_workers=1000)) == 1
    assert compute_threads(EngineConfig(threads=3, local_workers=2)) == 3
