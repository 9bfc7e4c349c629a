"""What a run has published: manifests with the cost files beside them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import Manifest, read_manifest
from scripts.lib.ground.stage import Job

# Flag of the report's command line to the stage whose manifests it takes, in the order in which data flow.
STAGES = {
    "target": "target",
    "raw": "fetch",
    "prepared": "prepare",
    "responses": "generate",
    "tokens": "encode",
    "merged": "merge",
    "vocab": "vocab",
    "hidden": "hidden",
    "drafters": "train",
    "cells": "benchmark",
}
ONE_A_RUN = ("target", "merged", "vocab", "hidden")


@dataclass(frozen=True)
class Published:
    """One published folder. `name` is the dataset, drafter or cell that it belongs to, empty where a run has only one."""

    folder: Path
    name: str
    manifest: Manifest
    cost: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path, flag: str) -> "Published":
        """The folder of the manifest at `path`, given under `flag`. StageError when manifest or cost file cannot be read."""
        name = "" if flag in ONE_A_RUN else path.parent.name
        if flag == "cells":
            name = "/".join(path.parts[-4:-1])  # task, variant, concurrency
        manifest = read_manifest(path, STAGES[flag])
        cost = path.with_name("cost.json")
        try:
            return cls(path.parent, name, manifest, json.loads(cost.read_text()))
        except (OSError, ValueError) as error:
            raise StageError(f"{cost}: not readable ({error}); delete {path} and run again to rebuild stage {STAGES[flag]}") from error

    @property
    def tokens(self) -> int:
        """Tokens of all data files."""
        return sum(shard.tokens for shard in self.manifest.shards)

    @property
    def bytes(self) -> int:
        """Bytes of all data files."""
        return sum(shard.bytes for shard in self.manifest.shards)


@dataclass(frozen=True)
class Run:
    """Everything that the report reads: published folders by flag, in order of name."""

    name: str
    parts: Mapping[str, Sequence[Published]]

    @classmethod
    def read(cls, job: Job) -> "Run":
        """From the manifests that the report was given."""
        parts = {flag: sorted((Published.read(path, flag) for path in job.inputs[flag]), key=lambda part: part.name) for flag in STAGES}
        return cls(job.settings["run"], parts)

    def one(self, flag: str) -> Published:
        """The only folder given under `flag`."""
        (part,) = self.parts[flag]
        return part

    def find(self, flag: str, name: str) -> Published | None:
        """The folder of `name` under `flag`, None when that stage does not concern it."""
        return next((part for part in self.parts[flag] if part.name == name), None)

    def __iter__(self) -> Iterator[tuple[str, Published]]:
        """All folders with their stages, in the order in which data flow."""
        for flag, parts in self.parts.items():
            for part in parts:
                yield STAGES[flag], part
