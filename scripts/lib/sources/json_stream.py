"""JSON records read value by value, so that neither a large array nor a cut file has to fit or to parse as a whole."""

import codecs
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from scripts.lib.ground.errors import StageError

CHUNK_BYTES = 2**20
BOM = codecs.BOM_UTF8
TAIL = 6  # a cut escape (\u12) or literal (fals) is reported up to this many characters before the end
KEY = "_key"
DECODER = json.JSONDecoder()
FIRST_IS_OBJECT = re.compile(r'\{\s*"(?:[^"\\]|\\.)*"\s*:\s*\{')


@dataclass(frozen=True)
class Cut:
    """A file that ends inside a record: where that record starts, in bytes of the unpacked text, and how many whole ones come before."""

    file: str
    byte_offset: int
    records: int


class CutValueError(Exception):
    """The text ends before the value does."""


class JsonText:
    """A cursor over the JSON text of `file`; holds one chunk and the value that crosses it."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path = file, path
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.position = "", 0
        self.consumed = 0  # bytes before self.text
        self.chunk = CHUNK_BYTES

    @property
    def offset(self) -> int:
        """Byte offset of the cursor in the unpacked text, a byte order mark not counted."""
        return self.consumed + len(self.text[: self.position].encode())

    def more(self) -> bool:
        """Read one more chunk, twice the last while one value goes on; False at the end of the file."""
        data = self.file.read(self.chunk)
        rest = self.text[self.position :]
        self.consumed, self.position = self.offset, 0
        try:
            self.text = rest + self.decoder.decode(data)
        except UnicodeDecodeError as error:
            raise StageError(
                f"{self.path}: not UTF-8 near byte {self.consumed + len(rest.encode()) + error.start}; convert the file to UTF-8"
            ) from error
        return bool(data)

    def peek(self) -> str:
        """The next character that is no white space, without taking it; empty at the end of the file."""
        while True:
            while self.position < len(self.text):
                if not self.text[self.position].isspace():
                    return self.text[self.position]
                self.position += 1
            if not self.more():
                return ""

    def take(self, character: str) -> None:
        """Step over `character`. Raises CutValueError at the end of the file and StageError on anything else."""
        found = self.peek()
        if not found:
            raise CutValueError
        if found != character:
            raise StageError(f"{self.path}: byte {self.offset}: {found!r} where {character!r} was expected; repair the file")
        self.position += 1

    def value(self) -> Any:
        """The next JSON value. Raises CutValueError when the file ends inside it, StageError when it is no JSON."""
        self.chunk = CHUNK_BYTES
        if not self.peek():
            raise CutValueError
        while True:
            try:
                value, self.position = DECODER.raw_decode(self.text, self.position)
                return value
            except json.JSONDecodeError as error:
                cut = error.pos >= len(self.text) - TAIL or error.msg.startswith("Unterminated string")
                if not cut:
                    raise StageError(
                        f"{self.path}: byte {self.offset}: the record there is no JSON ({error.msg}); repair the file"
                    ) from error
            except (ValueError, RecursionError) as error:
                raise StageError(
                    f"{self.path}: byte {self.offset}: the record there cannot be held in memory ({error}); take it out of the file"
                ) from error
            self.chunk *= 2
            if not self.more():
                raise CutValueError


def json_records(file: BinaryIO, path: Path, lines: bool, on_cut: Callable[[Cut], None]) -> Iterator[dict[str, Any]]:
    """Records of `file` in order: of an array, of one value after the other (JSON lines), or of an object of objects.

    The last form is read only when not `lines`; each record then has its key under `_key`. `on_cut` hears of a file
    that ends inside a record after the whole records before it were given.
    """
    text = JsonText(file, path)
    first = text.peek()
    if first == "[":
        read = array_values(text)
    elif lines or not keyed(text):
        text = JsonText(file, path)
        file.seek(0)
        read = line_values(text)
    else:
        read = keyed_values(text)
    count = 0
    try:
        for record in read:
            if not isinstance(record, dict):
                raise StageError(
                    f"{path}: record {count} is {type(record).__name__}, not an object; choose files whose records are objects"
                )
            count += 1
            yield record
    except CutValueError:
        on_cut(Cut(path.name, text.offset, count))


def line_values(text: JsonText) -> Iterator[Any]:
    """Values up to the end of the file: a line at a time, which is several times faster, for as long as each line is one value.

    From the first line that is not, values are read wherever they end; `text` starts at the first byte of the file.
    """
    for line in text.file:
        if not line.isspace():
            try:
                value = json.loads((line.removeprefix(BOM) if text.consumed == 0 else line).decode())
            except (ValueError, RecursionError):
                text.file.seek(text.consumed)
                yield from value_sequence(text)
                return
            yield value
        text.consumed += len(line)


def array_values(text: JsonText) -> Iterator[Any]:
    """The elements of the array that starts at the cursor. Raises CutValueError when it is not closed."""
    text.take("[")
    if text.peek() != "]":
        yield text.value()
    while text.peek() != "]":
        text.take(",")
        yield text.value()
    text.take("]")
    if text.peek():
        raise StageError(f"{text.path}: byte {text.offset}: more text after the end of the array; repair the file")


def value_sequence(text: JsonText) -> Iterator[Any]:
    """Values up to the end of the file, with nothing or white space between."""
    while text.peek():
        yield text.value()


def keyed_values(text: JsonText) -> Iterator[Any]:
    """The values of the object that starts at the cursor, each with its key under `_key`."""
    separator = "{"
    while True:
        text.take(separator)
        key = text.value()
        text.take(":")
        value = text.value()
        yield {KEY: key, **value} if isinstance(value, dict) else value
        if text.peek() == "}":
            return
        separator = ","


def keyed(text: JsonText) -> bool:
    """Whether the object at the cursor is one object of objects, not the first record of several.

    An object that goes on past the first chunk is judged by its first value.
    """
    while True:
        try:
            value, end = DECODER.raw_decode(text.text, text.position)
        except (ValueError, RecursionError):
            return FIRST_IS_OBJECT.match(text.text, text.position) is not None
        if text.text[end:].strip():
            return False
        if not text.more():
            return bool(value) and all(isinstance(item, dict) for item in value.values())
