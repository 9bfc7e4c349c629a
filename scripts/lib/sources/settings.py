"""What a source is: one line of the config, checked."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.lib.ground.errors import StageError

KINDS = ("hub", "path", "wheel", "generator")
COMMIT = re.compile(r"[0-9a-f]{40}")
PINNED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9._+!-]*)")


@dataclass(frozen=True)
class Address:
    """`KIND:LOCATOR` of the config."""

    kind: str
    locator: str

    @classmethod
    def of(cls, text: str, kinds: tuple[str, ...] = KINDS) -> "Address":
        """Split `text`; StageError when its kind is none of `kinds` or nothing follows it."""
        kind, _, locator = text.partition(":")
        if kind not in kinds or not locator:
            raise StageError(f"source {text!r}: unknown kind {kind!r}; write one of {', '.join(f'{kind}:…' for kind in kinds)}")
        return cls(kind, locator)

    def pinned(self) -> tuple[str, str]:
        """Name and version of a locator NAME==VERSION; StageError when it is not pinned so."""
        match = PINNED.fullmatch(self.locator)
        if not match:
            raise StageError(f"source {self.kind}:{self.locator}: no pinned version; write {self.kind}:NAME==VERSION")
        return match[1], match[2]


@dataclass(frozen=True)
class SourceSettings:
    """One dataset or benchmark task to fetch; `name` and `seed` decide the seeds of a generator."""

    address: Address
    name: str
    seed: int
    members: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    revision: str | None = None
    subset: str | None = None
    split: str | None = None
    generator: Mapping[str, Any] | None = None
    licence: str | None = None

    @property
    def text(self) -> str:
        """The source as the config writes it."""
        return f"{self.address.kind}:{self.address.locator}"

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "SourceSettings":
        """Read the tracked slice {"source": {…}, "name": …, "seed": …}."""
        rest: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in settings["source"].items() if key != "source"
        }
        return cls(Address.of(settings["source"]["source"]), settings["name"], settings["seed"], **rest)


@dataclass(frozen=True)
class Fetched:
    """Finished files below `files/` of the stage's folder, with the records in each where known, and what is special to the source."""

    files: Mapping[Path, int]
    facts: Mapping[str, Any]


def checked_revision(source: str, revision: str | None) -> str:
    """`revision` when it is a full commit hash; StageError otherwise, because branches and tags move."""
    if revision is None or not COMMIT.fullmatch(revision):
        raise StageError(f"source {source}: revision {revision!r} is not pinned; set `revision` to a commit hash of 40 hex digits")
    return revision
