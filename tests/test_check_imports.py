"""The import rules hold for the code, and the script that checks them sees each kind of violation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_imports import ROOT, violations


def test_the_code_keeps_the_rules() -> None:
    assert list(violations(ROOT)) == []


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("services/api", "from services.scheduler import core"),
        ("services/api", "import services.worker.spec"),
        ("services/scheduler", "import torch"),
        ("services/tokenizer", "def f():\n    from torch import nn"),
        ("shared", "from services import api"),
        ("shared", "from pagebus.cli import main"),
        ("services/worker", "import pagebus"),
        ("services/worker", "import pickle"),
        ("pagebus", "from services.api.app import x"),
        ("services/worker", "def f(s):\n    s.recv_pyobj()"),
    ],
)
def test_violations_are_seen(tmp_path: Path, place: str, line: str) -> None:
    folder = tmp_path / place
    folder.mkdir(parents=True)
    (folder / "module.py").write_text(line + "\n")
    found = list(violations(tmp_path))
    assert len(found) == 1
    assert found[0].startswith(f"{place}/module.py:")


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("services/worker", "import torch\nfrom services.worker.spec import DecoderSpec\nfrom shared import bus"),
        ("pagebus", "from shared.flags import parse\nimport pagebus.cli"),
        ("shared", "import json\nfrom shared.errors import StartupError"),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, place: str, line: str) -> None:
    folder = tmp_path / place
    folder.mkdir(parents=True)
    (folder / "module.py").write_text(line + "\n")
    assert list(violations(tmp_path)) == []
