"""What the processes do not import: each of these takes its start a good part of a second, or more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.worker.backends import native_unavailable
from tests.model_factory import tiny_tokenizer

HEAVY = {"torch", "transformers", "huggingface_hub", "gguf", "yaml", "safetensors"}

LOAD = """
from shared.config import EngineConfig
from shared.model_info import read_model_info
engine = EngineConfig(max_model_len=256, threads=1, num_gpu_blocks_override=16)
model = read_model_info(engine)
"""
LAUNCHER = "import pagebus.serve as serve; from shared.config import EngineConfig; "
START = {
    "launcher": LAUNCHER + "serve.prepare(EngineConfig(), serve.ServeConfig())",
    "scheduler": LOAD + "import services.scheduler.__main__",
    "api": "import services.api.server",
    "tokenizer": LOAD + "from pathlib import Path; from services.tokenizer.loading import load; load(Path(model.path))",
    "worker": LOAD + "from services.worker.load import load; load(engine, model, lambda text: None)",
}
MORE = {"launcher": {"numpy", "zmq", "http.client"}, "scheduler": {"numpy"}, "api": {"numpy"}, "tokenizer": {"numpy"}}


@pytest.mark.parametrize("process", START)
def test_no_heavy_imports(process: str) -> None:
    if process == "worker" and native_unavailable():
        pytest.skip("the reference backend runs on torch")
    assert not imported(START[process]) & (HEAVY | MORE.get(process, set()))


def test_a_folder_that_needs_no_transformers(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    script = (
        "import sys; from pathlib import Path; from services.tokenizer.loading import load; load(Path(sys.argv[1]))"
    )
    assert not imported(script, str(tmp_path)) & HEAVY


def imported(script: str, *arguments: str) -> set[str]:
    """The modules of a process that has run the script."""
    command = [sys.executable, "-c", f"{script}\nimport sys; print(*sys.modules)", *arguments]
    loaded = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert "shared" in loaded
    return loaded
