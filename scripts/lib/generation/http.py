"""HTTP/1.1 over asyncio: connections that are kept open, one request at a time on each.

A general client library takes about 200 µs of CPU for a request and its answer, this one 25: at thousands of answers a second that
decides whether one process can keep its servers full.
"""

import asyncio
import re
import ssl
from dataclasses import dataclass
from typing import NamedTuple, cast
from urllib.parse import urlsplit

CONNECT_SECONDS = 10.0
IDLE_SECONDS = 2.0  # servers close idle connections after 5 seconds or more: an older one may be closing just now
HEAD_END = b"\r\n\r\n"
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
CLOSING = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
RETRY_AFTER = re.compile(rb"\r\nretry-after: *(\d+)\r\n", re.IGNORECASE)


class Reply(NamedTuple):
    """Status and body of one answer; `retry_after` in seconds where the server names it."""

    status: int
    body: bytes
    retry_after: float | None = None


@dataclass(frozen=True)
class Address:
    """Where a server listens; `prefix` is the path before every request's own, without a slash at its end."""

    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def of(cls, url: str) -> "Address":
        """From `http://HOST:PORT/PREFIX` or https."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        return cls(parts.hostname or "", parts.port or (443 if tls else 80), tls, parts.path.rstrip("/"))

    def request(self, method: str, path: str, body: bytes) -> bytes:
        """The bytes of one request."""
        head = f"{method} {self.prefix}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nContent-Type: application/json\r\n"
        return b"%bContent-Length: %d\r\n\r\n%b" % (head.encode(), len(body), body)


class Outbox:
    """Requests of one turn of the event loop, sent together at its end.

    Each alone would find a server that sleeps again since the last one and wake it: three times the price of sending it.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[asyncio.Transport, bytes]] = []

    def put(self, transport: asyncio.Transport, request: bytes) -> None:
        """Send `request` soon."""
        if not self.requests:
            asyncio.get_running_loop().call_soon(self.send)
        self.requests.append((transport, request))

    def send(self) -> None:
        """Send all that was put in, but for what goes to a transport that broke meanwhile: its connection tells the one who waits."""
        requests, self.requests = self.requests, []
        for transport, request in requests:
            if not transport.is_closing():  # uvloop raises at a closed one, and the rest would stay here
                transport.write(request)


class Connection(asyncio.Protocol):
    """One open connection."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.received = bytearray()
        self.head = b""
        self.waiting: asyncio.Future[Reply] | None = None
        self.open = False
        self.idle_since = 0.0

    async def exchange(self, request: bytes, seconds: float) -> Reply:
        """Send `request` and wait for its answer. Raises ConnectionError when the connection breaks, TimeoutError after `seconds`."""
        loop = asyncio.get_running_loop()
        self.waiting = loop.create_future()
        alarm = loop.call_later(seconds, self._expire)  # `asyncio.timeout` takes three times as long
        self.outbox.put(self.transport, request)
        try:
            return await self.waiting
        finally:
            alarm.cancel()

    def close(self) -> None:
        """Break the connection off, which makes the server drop the request in flight."""
        self.open = False
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self.transport, self.open = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self.received += data
        if not self.head:
            end = self.received.find(HEAD_END)
            if end < 0:
                return
            self.head = bytes(self.received[: end + len(HEAD_END)])
            del self.received[: end + len(HEAD_END)]
        body = self._body(ended=False)
        if body is not None:
            self._finish(body)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop; ends an answer that only the end of the connection delimits."""
        self.open = False
        body = self._body(ended=True) if self.head else None
        if body is not None:
            self._finish(body)
        elif self.waiting and not self.waiting.done():
            self.waiting.set_exception(ConnectionResetError(str(error or "the server closed the connection")))

    def _body(self, ended: bool) -> bytes | None:
        """The whole body once it is there."""
        length = LENGTH.search(self.head)
        if length:
            return bytes(self.received) if len(self.received) >= int(length[1]) else None
        if CHUNKED.search(self.head):
            return joined_chunks(bytes(self.received))
        return bytes(self.received) if ended else None

    def _expire(self) -> None:
        if self.waiting and not self.waiting.done():
            self.waiting.set_exception(TimeoutError())

    def _finish(self, body: bytes) -> None:
        status = int(self.head[9:12])
        seconds = None if status == 200 else RETRY_AFTER.search(self.head)
        reply = Reply(status, body, float(seconds[1]) if seconds else None)
        self.open = self.open and not CLOSING.search(self.head)
        self.received.clear()
        self.head = b""
        if self.waiting and not self.waiting.done():
            self.waiting.set_result(reply)


class Pool:
    """The connections to one server; there are as many as requests at once."""

    def __init__(self, url: str) -> None:
        self.address = Address.of(url)
        self.tls = ssl.create_default_context() if self.address.tls else None
        self.idle: list[Connection] = []
        self.outbox = Outbox()

    async def request(self, method: str, path: str, body: bytes, seconds: float) -> Reply:
        """The answer to one request. Raises TimeoutError after `seconds`, and OSError when the server is gone."""
        connection = await self._connection()
        loop = asyncio.get_running_loop()
        try:
            reply = await connection.exchange(self.address.request(method, path, body), seconds)
        except BaseException:
            connection.close()
            raise
        if connection.open:
            connection.idle_since = loop.time()
            self.idle.append(connection)
        else:
            connection.close()
        return reply

    def close(self) -> None:
        """Close what is idle."""
        while self.idle:
            self.idle.pop().close()

    async def _connection(self) -> Connection:
        """An idle connection that the server surely still holds open, or a new one."""
        loop = asyncio.get_running_loop()
        while self.idle:
            connection = self.idle.pop()
            if connection.open and loop.time() - connection.idle_since < IDLE_SECONDS:
                return connection
            connection.close()
        async with asyncio.timeout(CONNECT_SECONDS):
            _, made = await loop.create_connection(lambda: Connection(self.outbox), self.address.host, self.address.port, ssl=self.tls)
        return made


def joined_chunks(data: bytes) -> bytes | None:
    """The body in chunked transfer coding `data`, None while it is incomplete."""
    parts: list[bytes] = []
    place = 0
    while (end := data.find(b"\r\n", place)) >= 0:
        size = int(data[place:end].split(b";")[0], 16)
        if size == 0:
            return b"".join(parts)
        if len(data) < end + 2 + size + 2:
            return None
        parts.append(data[end + 2 : end + 2 + size])
        place = end + 2 + size + 2
    return None
