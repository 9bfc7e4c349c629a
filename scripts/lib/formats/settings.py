"""How the records of one dataset become rows, checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scripts.lib.chat.messages import ROLES
from scripts.lib.formats.record import Format
from scripts.lib.formats.registry import FORMATS
from scripts.lib.ground.errors import StageError


@dataclass(frozen=True)
class DatasetSettings:
    """One dataset or benchmark task; `columns` and `roles` of the config lie over the format's own."""

    name: str
    seed: int
    format: str
    columns: Mapping[str, str]
    roles: Mapping[str, str] = field(default_factory=dict)
    kind: str = "prompts"
    partition: str = "short"
    samples: int | None = None
    max_prompt_tokens: int | None = None
    tools: str = "keep"
    truncated: str = "refuse"
    max_rejected: float | None = None
    one_per_group: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "DatasetSettings":
        """Read the tracked slice {"dataset": {…}, "name": …, "seed": …}; StageError naming what the format knows."""
        name, dataset = settings["name"], settings["dataset"]
        if dataset["format"] not in FORMATS:
            raise StageError(f"{name}: unknown format {dataset['format']!r}; choose one of {', '.join(FORMATS)}")
        shape = FORMATS[dataset["format"]]
        chosen = {
            **dataset,
            "columns": checked_columns(name, shape, {**shape.defaults, **dataset.get("columns", {})}),
            "roles": checked_roles(name, {**shape.roles, **dataset.get("roles", {})}),
        }
        return cls(name=name, seed=settings["seed"], **chosen)

    @property
    def shape(self) -> Format:
        """The format's module, as registered."""
        return FORMATS[self.format]


def checked_columns(name: str, shape: Format, columns: Mapping[str, str]) -> Mapping[str, str]:
    """`columns` when the format knows each name and none that it needs is missing."""
    missing = sorted(set(shape.required + shape.keys) - set(columns))
    unknown = sorted(set(columns) - set(shape.known()))
    if missing or unknown:
        problem = f"columns lacks {', '.join(missing)}" if missing else f"columns holds unknown {', '.join(unknown)}"
        raise StageError(f"{name}: {problem}; this format takes {', '.join(shape.known())}")
    return columns


def checked_roles(name: str, roles: Mapping[str, str]) -> Mapping[str, str]:
    """`roles` when each label is mapped to a role that rows know."""
    for label, role in roles.items():
        if role not in ROLES:
            raise StageError(f"{name}: roles maps {label!r} to {role!r}; choose one of {', '.join(ROLES)}")
    return roles
