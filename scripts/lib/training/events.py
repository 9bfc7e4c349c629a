"""The training curve as TensorBoard reads it: `tensorboard --logdir results` shows runs while they train.

An event file is a row of records: length u64, masked checksum u32, an event in Protocol Buffers, masked checksum u32. An event
holds a time, the step and named numbers. Times here are steps too: equal curves make equal bytes.
"""

import struct
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

NAME = "events.out.tfevents.curve"
UNPLOTTED = ("step", "epoch")
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types


class Events:
    """The event file of one curve in `folder`: what stood there before is written anew, then rows are added."""

    def __init__(self, folder: Path) -> None:
        self.path, self.rows = folder / NAME, 0
        self.path.write_bytes(record(double(1, 0.0) + text(3, "brain.Event:2")))

    def write(self, curve: Sequence[Mapping[str, Any]]) -> None:
        """Add the rows of `curve` that are not there yet, as far as their figures are known."""
        added = list(takewhile(lambda row: "loss" in row, curve[self.rows :]))
        self.rows += len(added)
        with self.path.open("ab") as file:
            file.write(b"".join(record(event(row)) for row in added))


def event(row: Mapping[str, Any]) -> bytes:
    """The event of one row of a curve."""
    values = [text(1, tag(name)) + single(2, value) for name, value in row.items() if name not in UNPLOTTED and value is not None]
    summary = b"".join(field(1, BYTES, sized(value)) for value in values)
    return double(1, float(row["step"])) + field(2, VARINT, varint(row["step"])) + field(5, BYTES, sized(summary))


def tag(name: str) -> str:
    """The name of a column as TensorBoard groups it: held-out figures apart from those of training."""
    return f"held_out/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"training/{name}"


def record(data: bytes) -> bytes:
    """`data` between its length and its checksums."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked(length)) + data + struct.pack("<I", masked(data))


def masked(data: bytes) -> int:
    """CRC-32C of `data`, turned by 15 bits and moved, so that no checksum is one of a checksum."""
    found = crc32c(data)
    return ((found >> 15 | found << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """The checksum of `data` with Castagnoli's polynomial."""
    found = 0xFFFFFFFF
    for byte in data:
        found = TABLE[(found ^ byte) & 0xFF] ^ found >> 8
    return found ^ 0xFFFFFFFF


def table_entry(value: int) -> int:
    """What eight steps of the checksum's shift register make of `value`."""
    for _ in range(8):
        value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value


TABLE = tuple(table_entry(value) for value in range(256))


def field(number: int, wire: int, data: bytes) -> bytes:
    """A field of a message."""
    return varint(number << 3 | wire) + data


def double(number: int, value: float) -> bytes:
    """A field that holds a double."""
    return field(number, FIXED64, struct.pack("<d", value))


def single(number: int, value: float) -> bytes:
    """A field that holds a float32."""
    return field(number, FIXED32, struct.pack("<f", value))


def text(number: int, value: str) -> bytes:
    """A field that holds text."""
    return field(number, BYTES, sized(value.encode()))


def sized(data: bytes) -> bytes:
    """`data` behind its length."""
    return varint(len(data)) + data


def varint(value: int) -> bytes:
    """`value` >= 0 in groups of seven bits, the lowest first."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])
