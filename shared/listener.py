"""The listening socket of the HTTP gateway."""

from __future__ import annotations

import socket

from shared.errors import StartupError


def listen(host: str, port: int) -> socket.socket:
    """A TCP socket that listens on host and port. Raises StartupError when the address cannot be had."""
    if not 0 <= port <= 65535:
        raise StartupError(f"--port {port} is not a port; use 1 to 65535, or 0 for any free one")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StartupError(f"cannot listen on {host}:{port}: {reason}; choose another with --port or --host") from None
