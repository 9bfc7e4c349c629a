"""Finished answers on disk: append-only files of checked lines, which `kill -9` cannot spoil.

Answers that arrive together are on their way to the disk with one unbuffered write at once; every few seconds the kernel is asked to
flush, for the case that the machine itself fails. A line is `{"crc":"XXXXXXXX","record":{…}}`. What a kill tore can only be the end of
the last segment, and is cut off; a bad line anywhere else was damaged and is an error.
"""

import asyncio
import errno
import logging
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import polars as pl

from scripts.lib.ground.errors import StageError

log = logging.getLogger(__name__)
SEGMENT_BYTES = 2**28
FLUSH_SECONDS = 5.0
HEAD = b'{"crc":"'
MIDDLE = b'","record":'
START = len(HEAD) + 8 + len(MIDDLE)
ROWS_AT_ONCE = 65_536  # rows of the index that are Python objects at one time
INDEX = pl.Schema(
    {"id": pl.String(), "turn": pl.Int64(), "tokens": pl.Int64(), "segment": pl.Int64(), "offset": pl.Int64(), "size": pl.Int64()}
)


@dataclass(frozen=True)
class Place:
    """Where a line lies."""

    segment: int
    offset: int
    size: int


class Segments:
    """The segments in one folder. Records hold at least `id`, `turn`, `prompt_ids` and `output_ids`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.file: BinaryIO | None = None
        self.written = 0
        self.lines: list[bytes] = []
        self.appended = asyncio.Event()

    def append(self, record: Mapping[str, Any]) -> None:
        """Put `record` among those that the next `write` hands over."""
        if not self.lines:
            self.appended.set()
        self.lines.append(line_of(record))

    def write(self) -> None:
        """Hand what was appended to the kernel in one piece. Raises OSError when the disk is full."""
        data = b"".join(self.lines)
        self.lines.clear()
        self.appended.clear()
        if self.file is None or self.written >= SEGMENT_BYTES:
            self._next_segment()
        assert self.file is not None
        if self.file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.file.name)
        self.written += len(data)

    async def write_always(self) -> None:
        """`write` in the same turn of the event loop in which something was appended: many answers arrive in one."""
        while True:
            await self.appended.wait()
            self.write()

    def descriptor(self) -> int | None:
        """A descriptor of the open segment to flush and close, by another thread; None when nothing was appended yet."""
        return None if self.file is None else os.dup(self.file.fileno())

    def close(self) -> None:
        """Write what is left, flush, and close the open segment."""
        if self.lines:
            self.write()
        if self.file is not None:
            os.fsync(self.file.fileno())
            self.file.close()
            self.file = None

    def paths(self) -> list[Path]:
        """The segments in order."""
        return sorted(self.folder.glob("answers-*.jsonl"))

    def index(self) -> pl.DataFrame:
        """Where every record lies, by id and turn; a torn tail is cut off.

        Raises StageError for damage, and for a record that is there twice.
        """
        frames, rows = [pl.DataFrame(schema=INDEX)], []
        for place, record in self._records():
            tokens = len(record["prompt_ids"]) + len(record["output_ids"])
            rows.append((record["id"], record["turn"], tokens, place.segment, place.offset, place.size))
            if len(rows) == ROWS_AT_ONCE:
                frames.append(pl.DataFrame(rows, schema=INDEX, orient="row"))
                rows = []
        table = pl.concat([*frames, pl.DataFrame(rows, schema=INDEX, orient="row")]).sort("id", "turn")
        twice = table.filter(pl.struct("id", "turn").is_duplicated())
        if twice.height:
            raise StageError(f"{self.folder}: {twice['id'][0]} turn {twice['turn'][0]} is there twice; delete the folder and start again")
        return table

    def read(self, places: pl.DataFrame) -> Iterator[dict[str, Any]]:
        """The records at `places`, rows of the index, in their order."""
        paths = self.paths()
        handles: dict[int, BinaryIO] = {}
        try:
            for segment, offset, size in places.select("segment", "offset", "size").iter_rows():
                handle = handles.setdefault(segment, handles.get(segment) or paths[segment].open("rb"))
                handle.seek(offset)
                yield checked(handle.read(size), paths[segment], offset)
        finally:
            for handle in handles.values():
                handle.close()

    def _records(self) -> Iterator[tuple[Place, dict[str, Any]]]:
        """Every whole record with its place; the last segment loses its torn tail."""
        paths = self.paths()
        for segment, path in enumerate(paths):
            offset = 0
            with path.open("rb") as file:
                for line in file:
                    record = parsed(line)
                    if record is None:
                        rest = file.read()
                        if rest.strip() or segment + 1 < len(paths):
                            raise damaged(path, offset)
                        torn = len(line) + len(rest)
                        log.warning("torn_tail: cut %s bytes of an unfinished line from %s", torn, path)
                        os.truncate(path, offset)
                        break
                    yield Place(segment, offset, len(line)), record
                    offset += len(line)

    def _next_segment(self) -> None:
        if self.file is not None:
            os.fsync(self.file.fileno())
            self.file.close()
        self.file = (self.folder / f"answers-{len(self.paths()):05d}.jsonl").open("ab", buffering=0)
        self.written = 0


def line_of(record: Mapping[str, Any]) -> bytes:
    """The line that keeps `record`."""
    body = orjson.dumps(record)
    return b"%b%08x%b%b}\n" % (HEAD, zlib.crc32(body), MIDDLE, body)


def parsed(line: bytes) -> dict[str, Any] | None:
    """The record in a whole `line`, None when it is torn or damaged."""
    body = line[START:-2]
    if not line.startswith(HEAD) or not line.endswith(b"}\n") or line[len(HEAD) : len(HEAD) + 8] != b"%08x" % zlib.crc32(body):
        return None
    record: dict[str, Any] = orjson.loads(body)
    return record


def checked(line: bytes, path: Path, offset: int) -> dict[str, Any]:
    """The record in `line`. Raises StageError when it was damaged since it was written."""
    record = parsed(line)
    if record is None:
        raise damaged(path, offset)
    return record


def damaged(path: Path, offset: int) -> StageError:
    """The error for a bad line that no kill explains."""
    return StageError(f"{path}: the line at byte {offset} is damaged; cut the file before it, or delete it, and start again")
