"""`pagebus chat`: a conversation in the terminal with a running server, word by word as it answers."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 600.0  # a server under load may let a first word wait; pings keep the line alive meanwhile

HINT = "Ctrl-C stops an answer, Ctrl-D leaves."


class ChatError(Exception):
    """What went wrong, in one line."""


class Server:
    """An OpenAI server."""

    def __init__(self, url: str, api_key: str = "") -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ChatError(f"--url must look like http://127.0.0.1:8000, not {url}")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._parts = parts
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def first_model(self) -> str:
        """The name of the first model served. Raises ChatError."""
        with self._request("GET", "/v1/models") as response:
            try:
                return str(json.load(response)["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise ChatError(f"{self.url} does not list its models; is it an OpenAI server?") from None

    def answer(self, body: dict[str, Any]) -> Iterator[str]:
        """The pieces of a streamed chat completion. Raises ChatError; closing it ends the request on the server."""
        with self._request("POST", "/v1/chat/completions", json.dumps(body).encode()) as response:
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                data = line[6:].strip()
                if data == b"[DONE]":
                    return
                yield _piece(json.loads(data))
        raise ChatError("the answer broke off: the server closed the connection")

    @contextlib.contextmanager
    def _request(self, method: str, path: str, body: bytes | None = None) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.netloc, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            connection.close()
            raise ChatError(f"no server answers at {self.url} ({reason}); start one with: pagebus serve") from None
        try:
            connection.sock.settimeout(SILENCE_SECONDS)
            connection.request(method, self._parts.path.rstrip("/").removesuffix("/v1") + path, body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ChatError(_reason(response))
            yield response
        except TimeoutError:
            raise ChatError(f"the server has been silent for {SILENCE_SECONDS:.0f} s") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ChatError(f"the answer broke off: {error or type(error).__name__}") from None
        finally:
            connection.close()


def _piece(event: dict[str, Any]) -> str:
    """The text of a streamed chunk. Raises ChatError for the server's error event."""
    if "error" in event:
        raise ChatError(_message(event))
    choices = event.get("choices") or [{}]
    return str(choices[0].get("delta", {}).get("content") or "")


def _reason(response: http.client.HTTPResponse) -> str:
    raw = response.read(100_000)
    try:
        return f"{_message(json.loads(raw))} (status {response.status})"
    except (ValueError, LookupError, TypeError):
        return f"the server answered with status {response.status}"


def _message(body: dict[str, Any]) -> str:
    return " ".join(str(body["error"]["message"]).split())


class Conversation:
    """What has been said, and how to go on."""

    def __init__(self, server: Server, model: str, system: str, options: dict[str, Any]) -> None:
        self._server = server
        self._request = {"model": model, "stream": True, **options}
        self.messages = [{"role": "system", "content": system}] if system else []

    def say(self, text: str) -> None:
        """Sends a message and prints the answer as it comes; Ctrl-C stops it. Raises ChatError."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            with contextlib.closing(self._stream()) as stream:
                for piece in stream:
                    pieces.append(piece)
                    print(piece, end="", flush=True)
            print()
        except KeyboardInterrupt:
            print(" [stopped]")
        except ChatError:
            if pieces:
                print()
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def _stream(self) -> Any:
        return self._server.answer({**self._request, "messages": self.messages})


def talk(conversation: Conversation, prompt: str) -> int:
    """Reads messages until the input ends. Returns 1 if an answer failed last."""
    failed = 0
    while True:
        try:
            text = input(prompt).strip()
        except KeyboardInterrupt:
            print(f"\n{HINT}")
            continue
        except EOFError:
            if prompt:
                print()
            return failed
        if not text:
            continue
        try:
            conversation.say(text)
            failed = 0
        except ChatError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            failed = 1


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pagebus chat", description=f"Talk to a running server. {HINT}")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--model", default="", help="served name (default: the server's first)")
    parser.add_argument("--system", default="", help="a system message to begin with")
    parser.add_argument(
        "--temperature", type=float, help="0 takes the likeliest word each time (default: the server's)"
    )
    parser.add_argument("--max-tokens", type=int, help="longest answer (default: what the context leaves)")
    parser.add_argument("--api-key", default="", help="if the server asks for one")
    return parser.parse_args(argv)


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    args = _arguments(argv)
    options = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    try:
        server = Server(args.url, args.api_key)
        model = args.model or server.first_model()
    except ChatError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
        print(f"{model} at {server.url}. {HINT}")
    given = {key: value for key, value in options.items() if value is not None}
    return talk(Conversation(server, model, args.system, given), "> " if interactive else "")
