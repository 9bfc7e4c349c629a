"""Rows put together again from the files that the hook in the server writes, one per forward pass.

Shapes: T tokens of a row, n tokens of a part of it, F and f teachers in them, H hidden size.
"""

import json
import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from scripts.lib.engines.protocol import RowStates, StateRequest
from scripts.lib.ground.errors import StageError


@dataclass(frozen=True)
class Piece:
    """States of the tokens of a row from `first` on: `input_ids` [n], `aux` [n, 3, H], `final` [f, H], `argmax` [f]; views of a file."""

    first: int
    input_ids: Tensor
    aux: Tensor
    final: Tensor
    argmax: Tensor


class Inbox:
    """The files in `folder`, cut into pieces by the name of the row that they are asked for by. Several threads may use one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._pieces: dict[str, list[Piece]] = {}
        self._files = 0

    def expect(self, names: Sequence[str]) -> None:
        """Keep what comes under these names from now on."""
        with self._lock:
            self._pieces |= {name: [] for name in names}

    def forget(self, names: Sequence[str]) -> None:
        """Drop what came under these names, and what will come."""
        with self._lock:
            for name in names:
                self._pieces.pop(name, None)

    def poll(self) -> int:
        """Take in the files that are there; how many came so far. A file's bytes live as long as pieces of it are used."""
        with self._lock:
            for path in sorted(self.folder.glob("*.safetensors")):
                for name, piece in read_pieces(path):
                    if name in self._pieces:
                        self._pieces[name].append(piece)
                path.unlink()
                self._files += 1
            return self._files

    def row(self, name: str, request: StateRequest) -> RowStates | None:
        """The states of the row that was asked for as `name`, None unless its pieces cover it exactly once."""
        with self._lock:
            pieces = sorted(self._pieces[name], key=lambda piece: piece.first)
        return joined(name, pieces, request)

    def found(self, name: str) -> list[tuple[int, int]]:
        """First token and end of each piece that came under `name`."""
        with self._lock:
            return sorted((piece.first, piece.first + len(piece.input_ids)) for piece in self._pieces[name])


def read_pieces(path: Path) -> list[tuple[str, Piece]]:
    """Name and piece of each part of a row in the file at `path`."""
    with safe_open(path, framework="pt") as file:
        parts = json.loads(file.metadata()["parts"])
        ids, argmax, aux, final = (file.get_tensor(name) for name in ("input_ids", "argmax", "aux", "final"))
    pieces, token, teacher = [], 0, 0
    for name, first, count, finals in parts:
        tokens, teachers = slice(token, token + count), slice(teacher, teacher + finals)
        pieces.append((name, Piece(first, ids[tokens], aux[tokens], final[teachers], argmax[teachers])))
        token, teacher = token + count, teacher + finals
    return pieces


def joined(name: str, pieces: Sequence[Piece], request: StateRequest) -> RowStates | None:
    """The states of the row of `request` made of `pieces`, in order; None when they leave a gap or overlap.

    Raises StageError when they are those of other tokens or teachers: then rows are mixed up, and asking again would not help.
    """
    place = 0
    for piece in pieces:
        end = piece.first + len(piece.input_ids)
        if piece.first != place:
            return None
        teachers = bisect_left(request.final_index, end) - bisect_left(request.final_index, place)
        if piece.input_ids.tolist() != list(request.input_ids[place:end]) or len(piece.final) != teachers:
            raise StageError(
                f"row {name}: the server's states of tokens {place} to {end - 1} belong to other tokens, or {len(piece.final)} final "
                f"states came where {teachers} were wanted; the hook in the server mixes rows up, please report it with this log"
            )
        place = end
    if place != len(request.input_ids):
        return None
    parts = [(piece.aux, piece.final, piece.argmax) for piece in pieces]
    return RowStates(*(torch.cat(tensors) if len(parts) > 1 else tensors[0] for tensors in zip(*parts, strict=True)))
