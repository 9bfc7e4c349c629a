"""Lines of JSON between jobs and the keeper of servers, over a Unix socket."""

import contextlib
import json
import select
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def connection_to(path: Path) -> socket.socket | None:
    """A connection to whoever listens at `path`; None when nobody does."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    return connection


def tell(connection: socket.socket, words: object) -> None:
    """Send one line; who has gone hears nothing."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(words).encode() + b"\n")


def received(connection: socket.socket) -> Mapping[str, Any] | None:
    """The other side's next line, None when it has gone without one, or says nothing for as long as the connection's timeout."""
    line = b""
    while not line.endswith(b"\n"):
        try:
            byte = connection.recv(1)  # no more than the line: the next one is for the next call
        except OSError:
            return None
        if not byte:
            return None
        line += byte
    words: Mapping[str, Any] = json.loads(line)
    return words


def gone(connection: socket.socket, seconds: float = 0.0) -> bool:
    """Whether the other side, which has nothing more to say, ends its connection within `seconds`."""
    ready, _, _ = select.select([connection], [], [], seconds)
    try:
        return bool(ready) and not connection.recv(1)
    except OSError:
        return True
