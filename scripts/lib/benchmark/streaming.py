"""One streamed answer at a time over one open connection, with the moment at which each piece of it came.

While a server is timed, nothing is done with a piece but to note it: pieces are read once the answer is there.
"""

import asyncio
from dataclasses import dataclass, field
from time import perf_counter
from typing import cast

from scripts.lib.generation.http import CHUNKED, HEAD_END, LENGTH, Address

CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 600.0  # without any piece
EVENT_END = b"\n\n"


@dataclass
class Streamed:
    """An answer: its status, when it was asked for, and (moment, bytes) of each piece of its body."""

    begin: float
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    def body(self) -> bytes:
        """All pieces together."""
        return b"".join(piece for _, piece in self.pieces)

    def events(self) -> list[tuple[float, bytes]]:
        """The events of a `text/event-stream`, each with the moment at which it was whole."""
        found, rest = [], b""
        for moment, piece in self.pieces:
            *whole, rest = (rest + piece).split(EVENT_END)
            found += [(moment, event.removeprefix(b"data: ")) for event in whole]
        return found


class Wire(asyncio.Protocol):
    """One connection, which takes a body in chunks or of known length."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.open = False

    async def exchange(self, request: bytes) -> Streamed:
        """Send `request` and wait for the whole answer. Raises ConnectionError, TimeoutError after a long silence."""
        loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = loop.create_future()
        self.headed, self.length, self.last = False, -1, perf_counter()
        self.answer = Streamed(self.last)
        self.transport.write(request)
        while not (await asyncio.wait([self.done], timeout=SILENCE_SECONDS))[0]:
            if perf_counter() - self.last > SILENCE_SECONDS:
                self.close()
                raise TimeoutError(f"nothing came for {SILENCE_SECONDS:.0f} s")
        await self.done
        return self.answer

    def close(self) -> None:
        """Break the connection off."""
        self.open = False
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self.transport, self.open = cast(asyncio.Transport, transport), True

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        self.open = False
        if hasattr(self, "done") and not self.done.done():
            self.done.set_exception(ConnectionResetError(str(error or "the server closed the connection")))

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self.last = perf_counter()
        self.received += data
        if not self.headed and not self._head():
            return
        if self.length < 0:
            self._chunks()
        elif len(self.received) >= self.length:
            self.answer.pieces.append((self.last, bytes(self.received[: self.length])))
            self._finish(self.length)

    def _head(self) -> bool:
        """Read the head once it is whole."""
        end = self.received.find(HEAD_END)
        if end < 0:
            return False
        head = bytes(self.received[: end + 2])
        del self.received[: end + len(HEAD_END)]
        self.headed, self.answer.status = True, int(head[9:12])
        length = LENGTH.search(head)
        self.length = -1 if CHUNKED.search(head) else int(length[1]) if length else 0
        return True

    def _chunks(self) -> None:
        """Take every whole chunk out of what was received."""
        while not self.done.done() and (end := self.received.find(b"\r\n")) >= 0:
            size = int(self.received[:end].split(b";")[0], 16)
            start, stop = end + 2, end + 2 + size
            if len(self.received) < stop + 2:
                return
            if size == 0:
                self._finish(stop + 2)
            else:
                self.answer.pieces.append((self.last, bytes(self.received[start:stop])))
                del self.received[: stop + 2]

    def _finish(self, size: int) -> None:
        del self.received[:size]
        if not self.done.done():
            self.done.set_result(None)


class Line:
    """Asks one server one thing at a time."""

    def __init__(self, url: str) -> None:
        self.address = Address.of(url)
        self.wire: Wire | None = None

    async def connect(self) -> Wire:
        """The open connection. Raises OSError when there is none."""
        if self.wire is None or not self.wire.open:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(CONNECT_SECONDS):
                _, self.wire = await loop.create_connection(Wire, self.address.host, self.address.port)
        return self.wire

    async def post(self, path: str, body: bytes) -> Streamed:
        """The answer to a POST. Raises OSError when there is none."""
        wire = await self.connect()
        return await wire.exchange(self.address.request("POST", path, body))

    def close(self) -> None:
        """Close the connection."""
        if self.wire is not None:
            self.wire.close()
