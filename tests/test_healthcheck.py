"""The containers' health checks, against real sockets."""

from __future__ import annotations

import http.server
import socket
import subprocess
import sys
import threading

import pytest

from shared.healthcheck import connected, http_ok, listens

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_listening_and_connected_ports_are_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listens(port)
        assert not connected(port)
        with socket.create_connection(("127.0.0.1", port)):
            assert connected(port)
    assert not listens(port)


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_http(status: int, healthy: bool) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert http_ok(server.server_port) == healthy
        thread.join()


def test_as_a_command() -> None:
    command = [sys.executable, "-m", "shared.healthcheck"]
    assert subprocess.run([*command, "--listens", "1"], check=False).returncode == 1
    assert subprocess.run([*command, "--nonsense"], check=False, capture_output=True).returncode == 1
