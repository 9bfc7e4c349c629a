"""A server that answers at once: `python benchmarks/stub.py PORT`. What `benchmarks/client.py` asks."""

import asyncio
import random
import sys
from collections.abc import Iterator
from typing import cast

import orjson
import uvloop

LONGEST_ANSWER, VOCABULARY = 128, 250


class Stub(asyncio.Protocol):
    """Answers every POST with one of 512 ready-made answers, and every GET with an empty object."""

    answers: tuple[bytes, ...] = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self.transport, self.received, self.number = cast(asyncio.Transport, transport), b"", random.randrange(512)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self.received += data
        end = self.received.find(b"\r\n\r\n")
        if end < 0:
            return
        length = int(self.received[:end].rpartition(b"Content-Length: ")[2])
        if len(self.received) < end + 4 + length:
            return
        posted = self.received.startswith(b"POST")
        self.received, self.number = b"", (self.number + 1) % 512
        self.transport.write(self.answers[self.number] if posted else whole_reply({}))


def whole_reply(value: object) -> bytes:
    """An HTTP answer that holds `value` as JSON."""
    body = orjson.dumps(value)
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def stub_answers(source: random.Random) -> Iterator[bytes]:
    """512 answers as SGLang gives them, of 1 to LONGEST_ANSWER tokens."""
    for _ in range(512):
        ids = [source.randrange(3, VOCABULARY) for _ in range(source.randrange(LONGEST_ANSWER))] + [source.randrange(3, VOCABULARY), 2]
        finish = {"type": "stop", "matched": 2}
        meta = {"id": "0" * 32, "finish_reason": finish, "prompt_tokens": 9, "completion_tokens": len(ids), "e2e_latency": 0.1}
        yield whole_reply({"text": "x " * len(ids), "output_ids": ids, "meta_info": meta})


def serve(port: int) -> None:
    """The stub's process."""

    async def forever() -> None:
        Stub.answers = tuple(stub_answers(random.Random(1)))
        listening = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", port)
        await listening.serve_forever()

    uvloop.run(forever())


if __name__ == "__main__":
    serve(int(sys.argv[1]))
