"""`pagebus serve` from outside: mistakes cost a second and one line, and nothing is left behind."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import EXIT_CONFIG
from tests.model_factory import smollm2, tiny_model
from tests.stack import serving, wait_until


def serve(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagebus", "serve", "--host", "127.0.0.1", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("tiny"))


def refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == EXIT_CONFIG, result
    lines = result.stderr.strip().splitlines()
    assert all(word in lines[-1] for word in words), result.stderr
    assert "Traceback" not in result.stderr


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = serve("--port", str(port))
    refused(result, f"127.0.0.1:{port}", "--port")
    assert len(result.stderr.splitlines()) == 1
    assert not result.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "70000"], ["70000"]),
        (["--host", "no.such.host.invalid", "--port", "0"], ["no.such.host.invalid"]),
        (["/no/such/model", "--port", "0"], ["/no/such/model"]),
        (["--max-model-len", "1000000000", "--port", "0"], ["--max-model-len", "8192"]),
        (["--workrs", "2"], ["--workers"]),
        (["--gpu-memory-utilization", "1.5"], ["--gpu-memory-utilization"]),
    ],
    ids=str,
)
def test_mistakes_are_one_line(flags: list[str], words: list[str]) -> None:
    refused(serve(*flags), *words)


def test_an_unsupported_architecture_names_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["FooForCausalLM"], "model_type": "foo"}')
    refused(serve(str(tmp_path), "--port", "0"), "FooForCausalLM", "LlamaForCausalLM")


def test_a_missing_tensor_is_named_and_nothing_restarts(tiny: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tiny / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    result = serve(str(tmp_path), "--port", "0")
    assert result.returncode == EXIT_CONFIG
    assert "model.layers.1.mlp.up_proj.weight" in result.stderr
    assert "Traceback" not in result.stderr
    assert "restarting" not in result.stdout


def test_too_little_memory_says_what_would_fit_and_the_advice_works(tiny: Path) -> None:
    result = serve(str(tiny), "--port", "0", "--kv-cache-memory-bytes", "100000")
    assert result.returncode == EXIT_CONFIG
    advice = re.search(r"--max-model-len (\d+)", result.stderr)
    assert advice, result.stderr
    with serving(str(tiny), "--kv-cache-memory-bytes", "100000", "--max-model-len", advice[1]) as stack:
        assert stack.http.get("/health").status_code == 200


def test_children_are_named_restarted_and_all_end(tiny: Path) -> None:
    with serving(str(tiny), "--tokenizers", "2", "--workers", "2", "--api-replicas", "2") as stack:
        kinds = {"scheduler": 1, "tokenizer": 2, "worker": 2, "api": 2}
        before = {kind: stack.pids(kind) for kind in kinds}
        assert {kind: len(pids) for kind, pids in before.items()} == kinds
        for kind in kinds:
            pid = stack.kill(kind)
            wait_until(lambda kind=kind: len(stack.pids(kind)) == kinds[kind])
            wait_until(lambda pid=pid: any(str(pid) in line and "SIGKILL" in line for line in stack.lines))
        wait_until(lambda: stack.http.get("/health").status_code == 200)
        everyone = [pid for kind in kinds for pid in stack.pids(kind)]
        assert stack.stop() == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in everyone)


def test_gguf_folder_and_served_names() -> None:
    with serving(str(smollm2().parent), "--served-model-name", "a", "b", "--max-model-len", "256") as stack:
        assert [model["id"] for model in stack.http.get("/v1/models").json()["data"]] == ["a", "b"]
        reply = stack.http.post("/v1/completions", json={"model": "b", "prompt": "Hi", "max_tokens": 2}).json()
        assert reply["model"] == "a"  # the first name is the one in replies, as in vLLM
        assert stack.http.get("/v1/models/c").status_code == 404
