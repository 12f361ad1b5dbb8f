"""`pagebus chat` against a small server that streams what it is told to."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pagebus.chat import run


class Handler(BaseHTTPRequestHandler):
    """Answers "N: <last message>", word by word; some messages make it misbehave."""

    protocol_version = "HTTP/1.1"
    requests: list[dict[str, Any]]
    released: threading.Event

    def do_GET(self) -> None:
        self._json({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body["authorization"] = self.headers["Authorization"]
        self.requests.append(body)
        text = body["messages"][-1]["content"]
        if text == "refuse":
            self._json({"error": {"message": "too\nlong", "type": "x", "param": None, "code": None}}, 400)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.close_connection = True
        self._send({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        self.wfile.write(b": ping\n\n")
        for word in [f"{len(self.requests)}:", *(f" {word}" for word in text.split())]:
            self._send({"choices": [{"index": 0, "delta": {"content": word}}]})
        if text == "break":
            return
        if text == "fail":
            self._send({"error": {"message": "the engine failed"}})
        if text == "wait":
            self.wfile.flush()
            self.released.wait(30)
        self._send({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self._send({"choices": [], "usage": {"completion_tokens": 3}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _json(self, answer: dict[str, Any], status: int = 200) -> None:
        raw = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    Handler.requests, Handler.released = [], threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *args: None  # type: ignore[method-assign]  # a client that hangs up is no error
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    Handler.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


def chat(monkeypatch: pytest.MonkeyPatch, said: str, *argv: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    return run(list(argv))


def test_a_conversation_of_several_turns(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, "hello there\n\nagain 你好\n", "--url", url, "--system", "be brief") == 0
    assert capsys.readouterr().out == "1: hello there\n2: again 你好\n"
    assert Handler.requests[1]["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": "1: hello there"},
        {"role": "user", "content": "again 你好"},
    ]
    assert Handler.requests[0]["model"] == "tiny"
    assert Handler.requests[0]["stream"] is True
    assert "temperature" not in Handler.requests[0]


def test_options_reach_the_server(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["--model", "other", "--temperature", "0", "--max-tokens", "7", "--api-key", "secret"]
    assert chat(monkeypatch, "hi\n", "--url", f"{url}/v1/", *argv) == 0
    (request,) = Handler.requests
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("other", 0.0, 7)
    assert request["authorization"] == "Bearer secret"
    assert "system" not in {message["role"] for message in request["messages"]}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("refuse", "error: too long (status 400)"),
        ("break", "error: the answer broke off: the server closed the connection"),
        ("fail", "error: the engine failed"),
    ],
)
def test_an_error_is_one_line_and_the_chat_goes_on(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, line: str
) -> None:
    assert chat(monkeypatch, f"{text}\nhi\n", "--url", url) == 0
    found = capsys.readouterr()
    assert found.err.splitlines() == [line]
    assert found.out.endswith("2: hi\n")
    assert Handler.requests[1]["messages"] == [{"role": "user", "content": "hi"}], "what failed is not repeated"
    assert chat(monkeypatch, f"{text}\n", "--url", url) == 1


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "127.0.0.1:1", "http://no.such.host.invalid:80"])
def test_no_server_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    assert chat(monkeypatch, "hi\n", "--url", address) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no server answers at http://")
    assert line.endswith("start one with: pagebus serve")


def test_an_address_that_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(monkeypatch, "hi\n", "--url", "ftp://x") == 1
    assert "--url must look like" in capsys.readouterr().err


def test_a_server_of_another_kind(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Handler, "do_GET", lambda self: self._json({"hello": 1}))
    assert chat(monkeypatch, "hi\n", "--url", url) == 1
    assert "is it an OpenAI server?" in capsys.readouterr().err


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, url: str) -> None:
        code = f"import sys; from pagebus.chat import run; sys.exit(run(['--url', {url!r}]))"
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            # Tests that a shell runs in the background start with the interrupt ignored, as would what they start.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(slave)
        self.seen = ""

    def until(self, text: str) -> None:
        """Reads on until `text` has been shown; what follows it counts for the next call."""
        while text not in self.seen:
            raw = os.read(self.master, 4096)
            assert raw, self.seen
            self.seen += raw.decode()
        self.seen = self.seen.partition(text)[2]

    def interrupt(self, text: str) -> None:
        """Ctrl-C until `text` has been shown: one that falls between the prompt and the wait for a key is not heard."""
        while text not in self.seen:
            self.process.send_signal(signal.SIGINT)
            while text not in self.seen and select.select([self.master], [], [], 1)[0]:
                self.seen += os.read(self.master, 4096).decode()
        self.until(text)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(url: str) -> Iterator[Terminal]:
    made = Terminal(url)
    yield made
    made.close()


def test_keys_in_a_terminal(terminal: Terminal) -> None:
    terminal.until("tiny at http://")
    terminal.until("> ")
    terminal.interrupt("Ctrl-D leaves")
    terminal.until("> ")
    terminal.type("wait\n")
    terminal.until("1: wait")
    terminal.interrupt("[stopped]")
    terminal.until("> ")
    terminal.type("go on\n")
    terminal.until("2: go on")
    assert Handler.requests[1]["messages"][1] == {"role": "assistant", "content": "1: wait"}
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.process.wait(20) == 0
