"""TensorBoard's files: records and checksums as its readers want them, numbers as they are in the curve."""

import struct
from collections.abc import Iterator
from typing import Any

from scripts.lib.training.events import NAME, Events, crc32c, masked, varint

CURVE = [
    {"step": 1, "epoch": 1, "learning_rate": 0.5, "loss": 2.5, "loss_0": 2.0},
    {"step": 300, "epoch": 1, "learning_rate": 0.25, "loss": 1.5, "eval_accuracy_0": 0.75, "eval_accept_length": None},
    {"step": 301, "epoch": 1, "learning_rate": 0.125},  # its figures are still on the GPU
]


def records(data: bytes) -> Iterator[bytes]:
    """The records of an event file; an AssertionError where a checksum is wrong."""
    while data:
        (length,), (check,) = struct.unpack("<Q", data[:8]), struct.unpack("<I", data[8:12])
        content = data[12 : 12 + length]
        assert check == masked(data[:8]) and struct.unpack("<I", data[12 + length : 16 + length]) == (masked(content),)
        yield content
        data = data[16 + length :]


def number(data: bytes) -> tuple[int, bytes]:
    """The first varint of `data`, and the rest."""
    end = next(place for place, byte in enumerate(data) if byte < 128) + 1
    return sum((byte & 127) << 7 * place for place, byte in enumerate(data[:end])), data[end:]


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a message."""
    while data:
        key, data = number(data)
        wire = key & 7
        if wire == 0:
            value, data = number(data)
            yield key >> 3, value
            continue
        length, data = number(data) if wire == 2 else ({1: 8, 5: 4}[wire], data)
        content, data = data[:length], data[length:]
        yield key >> 3, content if wire == 2 else struct.unpack({1: "<d", 5: "<f"}[wire], content)[0]


def scalars(event: bytes) -> dict[str, float]:
    """Tags and numbers of an event."""
    (summary,) = [value for key, value in fields(event) if key == 5]
    return {dict(fields(value))[1].decode(): dict(fields(value))[2] for _, value in fields(summary)}


def test_checksums_are_those_of_the_standard():
    """Test vectors of RFC 3720, B.4."""
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert varint(300) == b"\xac\x02"


def test_rows_are_written_once_they_are_complete_and_anew_after_a_stop(tmp_path):
    events = Events(tmp_path)
    events.write(CURVE[:1])
    events.write(CURVE)
    written = (tmp_path / NAME).read_bytes()
    first, *rows = records(written)
    assert dict(fields(first))[3] == b"brain.Event:2"
    assert [dict(fields(row))[2] for row in rows] == [1, 300]
    assert scalars(rows[0]) == {"training/learning_rate": 0.5, "training/loss": 2.5, "training/loss_0": 2.0}
    assert scalars(rows[1]) == {"training/learning_rate": 0.25, "training/loss": 1.5, "held_out/accuracy_0": 0.75}
    Events(tmp_path).write(CURVE)
    assert (tmp_path / NAME).read_bytes() == written
