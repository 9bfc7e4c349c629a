"""The manifest that every stage writes last: what it read, what it gave, and what it rejected, by reason.

`manifest.json` holds only what the stage's inputs and settings decide, so that equal work gives equal bytes and
Snakemake's content comparison stops there. Seconds, rates, versions and memory go into `cost.json` beside it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import readable, sha256_file, sha256_text, write_json

SCHEMA_VERSION = 1
NAME = "manifest.json"


@dataclass(frozen=True)
class Counts:
    """Rows of one stage; `rows_in` equals `rows_out` plus all of `rejected`."""

    rows_in: int
    rows_out: int
    rejected: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = self.rows_in - self.rows_out - sum(self.rejected.values())
        if missing:
            raise StageError(
                f"row accounting: {self.rows_in} in, {self.rows_out} out, rejected {dict(self.rejected)}: "
                f"{missing} rows have no reason; this is a bug of the stage, please report it with its log"
            )


@dataclass(frozen=True)
class Shard:
    """One data file of a stage: its name in the stage's folder and what a reader checks."""

    name: str
    rows: int
    tokens: int
    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path, rows: int, tokens: int = 0, folder: Path | None = None) -> "Shard":
        """Describe the finished file at `path`; its name is relative to `folder`, the file's own folder if not given."""
        name = str(path.relative_to(folder or path.parent))
        return cls(name, rows, tokens, path.stat().st_size, sha256_file(path))


@dataclass(frozen=True)
class Manifest:
    """What one stage made of which inputs.

    `inputs` maps a path to the sha256 of the manifest read there; `facts` holds what is special to the stage.
    """

    stage: str
    settings: Mapping[str, Any]
    inputs: Mapping[str, str]
    counts: Counts
    shards: Sequence[Shard] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def digest(self) -> str:
        """The sha256 of the file that `write` makes."""
        return sha256_text(readable(asdict(self)))

    def write(self, folder: Path) -> None:
        """Write `manifest.json` into `folder`: the last file of the stage."""
        write_json(folder / NAME, asdict(self))


def read_manifest(path: Path, stage: str) -> Manifest:
    """Read the manifest at `path` and refuse one of another stage or schema.

    Raises StageError when it is missing, unreadable, or not what `stage` writes.
    """
    try:
        data = json.loads(path.read_text())
        data["counts"] = Counts(**data["counts"])
        data["shards"] = tuple(Shard(**shard) for shard in data["shards"])
        manifest = Manifest(**data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StageError(f"{path}: not a readable manifest ({error}); delete it and run again to rebuild stage {stage}") from error
    if (manifest.stage, manifest.schema_version) != (stage, SCHEMA_VERSION):
        raise StageError(
            f"{path}: written by stage {manifest.stage}, schema {manifest.schema_version}; "
            f"wanted stage {stage}, schema {SCHEMA_VERSION}; delete it and run again"
        )
    return manifest


def checked_shard(folder: Path, shard: Shard) -> Path:
    """The path of `shard` in `folder` once its size and sha256 are those of the manifest.

    Raises StageError that names the file, both values and the remedy when it is missing, cut or altered.
    """
    path = folder / shard.name
    remedy = f"delete {folder / NAME} and run again to rebuild it"
    if not path.is_file():
        raise StageError(f"{path}: listed in the manifest but missing; {remedy}")
    if path.stat().st_size != shard.bytes:
        raise StageError(f"{path}: {path.stat().st_size} bytes, the manifest says {shard.bytes}; {remedy}")
    digest = sha256_file(path)
    if digest != shard.sha256:
        raise StageError(f"{path}: sha256 {digest[:12]}…, the manifest says {shard.sha256[:12]}…; {remedy}")
    return path
