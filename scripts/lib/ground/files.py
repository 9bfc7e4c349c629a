"""Work folders that survive kill -9, and publishing by rename."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from scripts.lib.ground.errors import StageError

CHUNK_BYTES = 2**20


def canonical(value: Any) -> str:
    """`value` as JSON with sorted keys: equal values give equal text."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def sha256_file(path: Path) -> str:
    """Hex digest of the bytes of the file at `path`."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_text(text: str) -> str:
    """Hex digest of `text` in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that stands at `path` after the block, whole, or not at all: a temporary name, fsync, rename."""
    temporary = path.with_name(f".{path.name}.part")
    with temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole file or nothing."""
    with whole_file(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file or nothing."""
    write_bytes(path, text.encode())


def readable(value: Any) -> str:
    """`value` as readable JSON with sorted keys."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write `value` as readable JSON with sorted keys, whole or not at all."""
    write_text(path, readable(value))


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[Path]:
    """Hold `folder` for this process alone; the kernel lets go when the process dies, also by kill -9.

    A job whose Snakemake was killed may still run: a second one in the same folder would tear its files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.with_name(folder.name + ".lock")
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise StageError(f"{folder}: process {lock.read()} still works here; wait for it or stop it, then start again") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield folder


def check_one_disk(work: Path, output: Path) -> None:
    """StageError when a folder cannot be renamed from `work` to `output`: before the work, of which a failed rename would be the end."""
    places = [next(place for place in path.absolute().parents if place.exists()) for path in (work, output)]
    if len({place.stat().st_dev for place in places}) > 1:
        raise StageError(
            f"{output} would be published by renaming a folder from {places[0]}, but {places[1]} is on another disk, and a rename does not "
            "reach across: keep results/ whole on one disk, by moving it there and linking to it"
        )


def publish(work: Path, output: Path) -> None:
    """Move the finished folder `work` to `output`, replacing what was published there before.

    Both must lie on one file system. The old folder is moved aside first, so that no reader sees a mixture.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = work.with_name(work.name + ".old")
    shutil.rmtree(aside, ignore_errors=True)
    if output.exists():
        os.rename(output, aside)
    os.rename(work, output)
    shutil.rmtree(aside, ignore_errors=True)
    work.with_name(work.name + ".lock").unlink(missing_ok=True)
