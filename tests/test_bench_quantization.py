"""The benchmark of quantisation: its figures on known input, and a run on a tiny model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from services.worker import native
from tests.model_factory import tiny_model, to_gguf

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
if native.unavailable() is None:
    from bench import quantization


def test_perplexity_of_even_odds_is_their_number() -> None:
    ids = np.array([0, 3, 2, 1], np.int32)
    assert quantization.perplexity(np.full((4, 5), 7, np.float32), ids) == pytest.approx(5)
    sure = np.full((4, 5), -50, np.float32)
    sure[np.arange(3), ids[1:]] = 50
    assert quantization.perplexity(sure, ids) == pytest.approx(1)


def test_agreement_ends_with_the_first_difference() -> None:
    base = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    found = np.array([[1, 2, 0, 4], [5, 6, 7, 8]])
    assert quantization.agreement(found, base) == 6 / 8


def test_a_run_on_a_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = to_gguf(tiny_model("llama", tmp_path / "m"), tmp_path / "x.gguf", "Q8_0")
    small = dataclasses.replace(quantization.SMOLLM2, hidden_size=64, num_heads=1, num_kv_heads=1, intermediate_size=64)
    monkeypatch.setattr(quantization, "SMOLLM2", small)
    monkeypatch.setattr(quantization.Clock, "SECONDS", 0.01)
    monkeypatch.setattr(quantization, "PROMPTS", 3)
    monkeypatch.setattr(quantization, "CONTINUATION", 4)
    quantization.main(["--model", str(model), "--threads", "1", "--cpu-time"])
    lines = json.loads(capsys.readouterr().out)["lines"]
    assert [line["quantization"] for line in lines] == ["none", "int8", "int4", "w8a8", "gguf"]
    assert lines[0]["same_next"] == lines[0]["agreement"] == 1
    assert lines[0]["logit_error"] == 0
    assert all(0 < line["logit_error"] < 1 for line in lines[1:])
    assert all(line["weight_bytes"] < lines[0]["weight_bytes"] for line in lines[1:])
