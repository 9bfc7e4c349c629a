"""The tables between draft ids and target ids: built, written, and read with every check.

Shapes: V ids of the target, D ids of the drafter.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import write_bytes
from scripts.lib.ground.manifest import checked_shard, read_manifest

NAME = "draft_vocab.safetensors"


@dataclass(frozen=True)
class Vocabulary:
    """`d2t` int64 [D] holds offsets: draft id i is target id i + d2t[i]. `t2d` bool [V] marks the target ids that have a draft id."""

    d2t: torch.Tensor
    t2d: torch.Tensor

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 [D]: the target id of every draft id, ascending."""
        return torch.arange(len(self.d2t)) + self.d2t


def tables(target_ids: np.ndarray, vocabulary_size: int) -> Vocabulary:
    """The tables for `target_ids` int64 [D], ascending, of a target with `vocabulary_size` = V ids."""
    ids = torch.from_numpy(np.ascontiguousarray(target_ids, dtype=np.int64))
    t2d = torch.zeros(vocabulary_size, dtype=torch.bool)
    t2d[ids] = True
    return Vocabulary(ids - torch.arange(len(ids)), t2d)


def write_vocabulary(folder: Path, vocabulary: Vocabulary) -> Path:
    """Write both tables into `folder`; the path of the file."""
    path = folder / NAME
    write_bytes(path, save({"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}))
    return path


def read_vocabulary(manifest_path: Path) -> Vocabulary:
    """The tables that stage `vocab` published with the manifest at `manifest_path`.

    Raises StageError when the file is missing, altered, or its two tables disagree: a drafter would then propose
    other tokens than it was trained on.
    """
    (shard,) = read_manifest(manifest_path, "vocab").shards
    path = checked_shard(manifest_path.parent, shard)
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise StageError(f"{path}: not a safetensors file ({error}); {remedy(path)}") from error
    if set(tensors) != {"d2t", "t2d"}:
        raise StageError(f"{path}: holds {sorted(tensors)}, wanted d2t and t2d; {remedy(path)}")
    return checked(Vocabulary(tensors["d2t"], tensors["t2d"]), path)


def checked(vocabulary: Vocabulary, path: Path) -> Vocabulary:
    """`vocabulary` once arange(D) + d2t equals the ids where t2d is true. Raises StageError when it does not."""
    kinds = (vocabulary.d2t.dtype, vocabulary.t2d.dtype)
    if kinds != (torch.int64, torch.bool):
        raise StageError(f"{path}: d2t is {kinds[0]} and t2d {kinds[1]}, wanted int64 and bool; {remedy(path)}")
    marked = vocabulary.t2d.nonzero().flatten()
    if not torch.equal(vocabulary.target_ids, marked):
        raise StageError(
            f"{path}: arange + d2t ({len(vocabulary.d2t)} ids) is not where t2d is true ({len(marked)} ids): "
            f"d2t must hold offsets of ascending target ids; {remedy(path)}"
        )
    return vocabulary


def remedy(path: Path) -> str:
    """What to do about a bad file."""
    return f"delete {path.parent / 'manifest.json'} and run again to rebuild it"
