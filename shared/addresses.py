"""Addresses of the bus: where each socket listens, how it is bound, and the key it is encrypted with."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import stat
import time
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from shared.errors import StartupError

KEY_VARIABLE = "PAGEBUS_BUS_KEY"
IPC_PATH_MAX = 107  # bytes; sockaddr_un
BIND_SECONDS = 0.5


def is_tcp(address: str) -> bool:
    """Whether the address is of tcp, not of ipc. Raises StartupError when it is neither."""
    if address.startswith("tcp://"):
        return True
    if address.startswith("ipc:///"):
        return False
    if not address:
        raise StartupError("no bus address: give --scheduler (the scheduler: --bind) tcp://host:port or ipc:///folder")
    raise StartupError(f"bus address {address!r}: use tcp://host:port or ipc:///folder")


def front(address: str) -> str:
    """Where the scheduler at `address` listens for api and tokenizer processes."""
    return _endpoint(address, "front", 0)


def back(address: str) -> str:
    """Where the scheduler at `address` listens for workers."""
    return _endpoint(address, "back", 1)


def tokenizer_endpoint(address: str, instance: str) -> str:
    """Where a tokenizer that belongs to the scheduler at `address` binds: whoever reaches the scheduler reaches it."""
    if is_tcp(address):
        return f"tcp://{_local_ip(*_host_port(address))}:*"
    folder = _folder(address)
    _sweep(folder)
    return f"ipc://{folder}/tok-{instance[:16]}"


def bind(sock: zmq.Socket[bytes], endpoint: str) -> str:
    """Binds, and returns the endpoint in full. Raises StartupError that names the address.

    An address in use is tried again for `BIND_SECONDS`, as its last user may just be closing it.
    """
    if is_tcp(endpoint):
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        target, path = f"tcp://{_bind_host(host)}:{port}", None
    else:
        target, path = endpoint, Path(endpoint.removeprefix("ipc://"))
        _prepare_folder(path.parent)
    deadline = time.monotonic() + BIND_SECONDS
    while not _try_bind(sock, target, path):
        if time.monotonic() > deadline:
            raise StartupError(f"{endpoint} is in use: stop what listens there or choose another address")
        time.sleep(0.02)
    return str(sock.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")


def _try_bind(sock: zmq.Socket[bytes], target: str, path: Path | None) -> bool:
    """False when the address is in use. libzmq takes away any ipc socket in its way, so that only dead ones may be."""
    if path is not None and path.exists():
        if _answers(path):
            return False
        path.unlink(missing_ok=True)
    try:
        sock.bind(target)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise StartupError(f"cannot listen on {target}: {error.strerror}") from None
    return True


def curve_server(sock: zmq.Socket[bytes]) -> None:
    """Encrypts a listening socket with the shared key, if one is configured."""
    pair = _server_pair()
    if pair is not None:
        sock.curve_server = True
        sock.curve_secretkey = pair[1]


def curve_client(sock: zmq.Socket[bytes]) -> None:
    """Encrypts a connecting socket with the shared key, if one is configured. Only its holders know the server key."""
    pair = _server_pair()
    if pair is not None:
        sock.curve_serverkey = pair[0]
        sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()


def _server_pair() -> tuple[bytes, bytes] | None:
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        return None
    if not zmq.has("curve"):
        raise StartupError(f"{KEY_VARIABLE} is set, but this libzmq was built without CURVE")
    secret: bytes = z85.encode(hashlib.blake2b(key.encode(), digest_size=32, person=b"pagebus-bus").digest())
    public: bytes = zmq.curve_public(secret)
    return public, secret


def _endpoint(address: str, name: str, offset: int) -> str:
    if is_tcp(address):
        host, port = _host_port(address)
        return f"tcp://{host}:{port + offset}"
    return f"ipc://{_folder(address)}/{name}"


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65534:
        raise StartupError(f"bus address {address!r}: use tcp://host:port with a port from 1 to 65534")
    return host, int(port)


def _folder(address: str) -> str:
    folder = address.removeprefix("ipc://").rstrip("/")
    if len(os.fsencode(folder)) + len("/tok-") + 16 > IPC_PATH_MAX:
        raise StartupError(f"bus address {address!r}: a socket's path may have {IPC_PATH_MAX} bytes; shorten it")
    return folder


def _bind_host(host: str) -> str:
    """libzmq binds to numbers and interfaces only; a name is resolved here."""
    if host in ("*", "0.0.0.0") or host.startswith("["):
        return host
    try:
        found: list[Any] = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise StartupError(f"cannot listen on host {host!r}: {error.strerror}") from None
    return str(found[0][4][0])


def _local_ip(host: str, port: int) -> str:
    """The local address that packets to `host` leave from; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError as error:
            raise StartupError(f"scheduler host {host!r}: {error.strerror}") from None
        return str(probe.getsockname()[0])


def _prepare_folder(folder: Path) -> None:
    """Makes the folder of ipc sockets; it must be private, as whoever can open them can use the bus."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise StartupError(f"cannot make the bus folder {folder}: {error.strerror}") from None
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & 0o077:
        raise StartupError(f"bus folder {folder} is open to others (mode {mode:o}): use one of your own of mode 700")


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _sweep(folder: str) -> None:
    """Removes sockets of killed tokenizers. One just bound may not listen yet, so young ones stay."""
    for path in Path(folder).glob("tok-*"):
        try:
            if time.time() - path.stat().st_mtime > 10 and not _answers(path):
                path.unlink()
        except OSError:
            continue  # another process swept it
