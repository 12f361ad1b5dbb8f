"""The start-up benchmark, on a tiny model: every process accounts for its start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import startup
from tests.model_factory import tiny_model

PHASES = {
    "launcher": set(),
    "scheduler": {"imports", "model files", "bind"},
    "api": {"imports", "gateway"},
    "tokenizer": {"imports", "waiting", "tokenizer"},
    "worker": {"imports", "waiting", "headers", "weights", "warm-up"},
}


def test_a_line_of_a_log() -> None:
    line = "12:34:56 worker[77] INFO started in 1.20 s, 0.90 s of CPU: imports 0.50 (0.40), warm-up 0.70 (0.50)\n"
    process = startup.started(line)
    assert process is not None
    assert (process.role, process.pid) == ("worker", 77)
    assert process.phases == [startup.Phase("imports", 0.5, 0.4), startup.Phase("warm-up", 0.7, 0.5)]
    assert startup.started("12:34:56 worker[77] INFO ready: 3 blocks, loaded in 1.0 s\n") is None


def test_a_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("llama", tmp_path / "tiny")
    assert startup.main(["--runs", "1", "--", "--model", str(model), "--num-gpu-blocks-override", "200"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert {process["role"]: set(process["phases"]) for process in report["processes"]} == PHASES
    assert 0 < report["ready_s"] < report["first_token_s"]
    assert report["weights_mib"] == 0
    for process in report["processes"]:
        assert sum(phase["cpu_s"] for phase in process["phases"].values()) <= process["cpu_s"] + 0.05
        assert 0 < process["proportional_mib"] <= process["resident_mib"]
    assert "first token after" in printed.err


def test_a_server_that_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert startup.main(["--runs", "1", "--", "--model", str(tmp_path / "nothing")]) == 1
    assert "no such file" in capsys.readouterr().err


def test_weights_are_counted(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "tiny", dtype="bfloat16")
    size = startup.weight_bytes(["--model", str(model)])
    assert 2 * size == startup.weight_bytes(["--model", str(model), "--dtype", "float32"])
    assert 0 <= (model / "model.safetensors").stat().st_size - size < 10_000  # the header
