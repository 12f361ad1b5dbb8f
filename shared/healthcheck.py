"""Health checks for containers, run inside them: `python -m shared.healthcheck --listens PORT`, or one of the others.

`--listens`: something listens on this port. `--connected`: an established connection leads to this remote port.
`--http`: GET /health answers 200. Exit code 0 when healthy, 1 when not.
"""

from __future__ import annotations

import http.client
import sys
from collections.abc import Iterable
from pathlib import Path

ESTABLISHED, LISTEN = "01", "0A"
TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


def sockets(lines: Iterable[str]) -> set[tuple[int, int, str]]:
    """(local port, remote port, state) of each line of /proc/net/tcp, headers skipped."""
    found = set()
    for line in lines:
        fields = line.split()
        if fields and fields[0].rstrip(":").isdigit():
            local, remote = (int(address.rsplit(":", 1)[1], 16) for address in fields[1:3])
            found.add((local, remote, fields[3]))
    return found


def _all_sockets() -> set[tuple[int, int, str]]:
    return {
        entry for table in TABLES if Path(table).exists() for entry in sockets(Path(table).read_text().splitlines())
    }


def listens(port: int) -> bool:
    return any(local == port and state == LISTEN for local, _, state in _all_sockets())


def connected(port: int) -> bool:
    return any(remote == port and state == ESTABLISHED for _, remote, state in _all_sockets())


def http_ok(port: int, host: str = "127.0.0.1") -> bool:
    """Whether GET /health answers 200."""
    connection = http.client.HTTPConnection(host, port, timeout=4)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


CHECKS = {"--listens": listens, "--connected": connected, "--http": http_ok}

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in CHECKS or not sys.argv[2].isdigit():
        sys.exit("usage: python -m shared.healthcheck --listens PORT | --connected PORT | --http PORT")
    sys.exit(not CHECKS[sys.argv[1]](int(sys.argv[2])))
