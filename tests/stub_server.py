"""A server with SGLang's endpoints whose answers a test scripts: in a thread of the test, or `python -m tests.stub_server` as a process."""

import asyncio
import contextlib
import json
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EOS = 2


@dataclass(frozen=True)
class Say:
    """What the stub does with one request: after `seconds`, a reply of `status` with `value`, in one piece or in chunks."""

    value: Any
    status: int = 200
    seconds: float = 0.0
    chunked: bool = False
    headers: str = ""


Script = Callable[[dict[str, Any]], Say]


def native(ids: Sequence[int], kind: str = "stop") -> dict[str, Any]:
    """An answer of /generate."""
    return {"text": "not looked at", "output_ids": list(ids), "meta_info": {"finish_reason": {"type": kind}}}


def chat(message: dict[str, Any], kind: str = "stop") -> dict[str, Any]:
    """An answer of /v1/chat/completions."""
    return {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": kind}]}


def text_ids(text: str) -> list[int]:
    """Ids of `text` in the tiny tokenizer, with an end of turn."""
    from tests.tiny import tiny_tokenizer  # here, as its torch would make the process of `main` slow to start

    return [*tiny_tokenizer()(text, add_special_tokens=False)["input_ids"], EOS]


def prompt_text(body: dict[str, Any]) -> str:
    """The prompt of a request to /generate."""
    from tests.tiny import tiny_tokenizer

    return str(tiny_tokenizer().decode(body["input_ids"]))


@dataclass
class Stub:
    """What is asked and how much at once; `script` decides what is answered. `speaks` names the paths that exist.

    Once `gone` is set, nothing is answered any more.
    """

    script: Script
    target: Path
    speaks: tuple[str, ...] = ("/server_info", "/model_info", "/generate")
    asked: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    gone: bool = False

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if self.gone:
                    break
                sizes = [line.split(":")[1] for line in head.splitlines() if line.lower().startswith("content-length")]
                length = int(sizes[0]) if sizes else 0
                body = json.loads(await reader.readexactly(length) or b"{}")
                said = await self._said(head.split()[1], body)
                if self.gone:
                    break
                writer.write(framed(said))
                await writer.drain()
        writer.close()

    async def _said(self, path: str, body: dict[str, Any]) -> Say:
        info: dict[str, Any] = {
            "/health": {},
            "/server_info": {"version": "0.5.23"},
            "/model_info": {"model_path": str(self.target.resolve())},
        }
        info["/v1/models"] = {"data": [{"id": "tiny"}]}
        if path in info and (path in self.speaks or path in ("/health", "/v1/models")):
            return Say(info[path])
        if path not in self.speaks:
            return Say({"error": "no such path"}, 404)
        self.asked.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        said = self.script(body)
        await asyncio.sleep(said.seconds)
        self.in_flight -= 1
        return said


def framed(said: Say) -> bytes:
    """The bytes of one reply."""
    body = json.dumps(said.value).encode()
    head = f"HTTP/1.1 {said.status} X\r\n{said.headers}"
    if said.chunked:
        half = len(body) // 2
        parts = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:half], body[half:]))
        return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + parts + b"0\r\n\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@contextlib.contextmanager
def stub_server(stub: Stub) -> Iterator[str]:
    """The URL of `stub`, which runs in a thread."""
    loop = asyncio.new_event_loop()
    listening = loop.run_until_complete(asyncio.start_server(stub.connected, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(task)
        listening.close()
        loop.close()


def from_prompt(body: dict[str, Any]) -> list[int]:
    """An answer that depends on the prompt alone: 1 to 24 tokens and an end of turn."""
    digest = zlib.crc32(bytes(token % 256 for token in body["input_ids"]))
    return [*(3 + (digest >> place) % 250 for place in range(1 + digest % 24)), EOS]


def main(port: int, target: Path, log: Path) -> None:
    """Serve until killed; every answer takes a few milliseconds, and is noted in `log` when it goes out."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def script(body: dict[str, Any]) -> Say:
        ids = from_prompt(body)
        os.write(file, f"{json.dumps(body['input_ids'])}\n".encode())
        return Say(native(ids), seconds=0.002 * len(ids))

    async def forever() -> None:
        listening = await asyncio.start_server(Stub(script, target).connected, "127.0.0.1", port, reuse_port=True)
        await listening.serve_forever()

    asyncio.run(forever())


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
