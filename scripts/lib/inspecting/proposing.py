"""The config entry that would read a source, and what it gives for the records at hand."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.lib.formats.conversation import Conversation, read_conversation
from scripts.lib.formats.detecting import detected, labels
from scripts.lib.formats.record import Record, RejectedError
from scripts.lib.formats.refusing import likely_role
from scripts.lib.formats.settings import DatasetSettings
from scripts.lib.inspecting.sampling import Sample
from scripts.lib.sources.settings import SourceSettings

LONG = {"tokens": 4096, "characters": 16384}  # median length of a conversation from which on it belongs into the long partition
SAMPLES = 10_000
FOREIGN_MARKS = ("<|begin_of_thought|>", "<think>")  # a system text that asks for them would have the target imitate another model


@dataclass(frozen=True)
class Applied:
    """What an entry gives: conversations, and rejections as (number of the record, reason, value)."""

    conversations: list[Conversation]
    rejected: list[tuple[int, str, str]]

    @property
    def share(self) -> float:
        """Share of records that gave no conversation."""
        return len(self.rejected) / max(len(self.conversations) + len(self.rejected), 1)


def apply(records: Sequence[Record], entry: Mapping[str, Any], seed: int) -> Applied:
    """Read `records` as the config `entry` says."""
    keys = ("format", "columns", "roles", "kind", "partition")
    dataset = DatasetSettings.of({"dataset": {key: entry[key] for key in keys if key in entry}, "name": "source", "seed": seed})
    applied = Applied([], [])
    for number, record in enumerate(records):
        try:
            applied.conversations.append(read_conversation(record, dataset))
        except RejectedError as rejected:
            applied.rejected.append((number, rejected.reason, rejected.value))
    return applied


def mapping(records: Sequence[Record], source: str) -> tuple[dict[str, Any], list[str]]:
    """Format, columns and roles for `records` of `source`, and notes on what was guessed or left out."""
    entry, notes = detected(records, source), []
    system = entry["columns"].get("system")
    if system and any(mark in str(record.get(system)) for record in records for mark in FOREIGN_MARKS):
        entry["columns"] = {name: column for name, column in entry["columns"].items() if name != "system"}
        notes.append(f"column {system} asks for another model's thought marks and is left out; keep it with columns: {{system: {system}}}")
    dataset = DatasetSettings.of({"dataset": {**entry, "roles": {}}, "name": "source", "seed": 0})
    unknown = sorted(label for label in labels(records, dataset.columns) if label not in dataset.roles)
    if unknown and dataset.roles:
        entry["roles"] = {label: likely_role(label) for label in unknown}
        notes.append(f"roles of {', '.join(unknown)} are guessed: check them")
    return entry, notes


def proposal(settings: SourceSettings, sample: Sample, median: int, unit: str) -> tuple[dict[str, Any], list[str]]:
    """The entry for `datasets` of the config, and notes on what to check; `median` is a conversation's length in `unit`."""
    entry: dict[str, Any] = {"source": settings.text}
    for name in ("revision", "subset", "split"):
        entry |= {name: value} if (value := getattr(settings, name)) else {}
    for name in ("members", "exclude"):
        entry |= {name: list(value)} if (value := getattr(settings, name)) else {}
    entry |= {"generator": dict(settings.generator)} if settings.generator else {}
    found, notes = mapping(sample.records, settings.text)
    entry |= found | {"kind": "prompts", "partition": "long" if median > LONG[unit] else "short"}
    entry |= {"truncated": "keep"} if sample.cuts else {}
    entry |= {"samples": SAMPLES} if sample.seen > SAMPLES or not sample.complete else {}
    share = apply(sample.records, entry, settings.seed).share
    entry["max_rejected"] = min(math.ceil(share * 100 + 1) / 100, 1.0)
    notes.append("add `licence`; kind is native only where every answer is the target's own")
    return entry, notes


def dataset_name(locator: str) -> str:
    """A name for the config: lower-case letters, digits and _, a letter first."""
    last = locator.partition("==")[0].rstrip("/").rpartition("/")[2].partition(".")[0].lower()
    name = re.sub(r"[^a-z0-9]+", "_", last).strip("_")
    return name if name[:1].isalpha() else f"source_{name}".rstrip("_")


def counted(applied: Applied) -> Counter[str]:
    """Rejections by reason."""
    return Counter(reason for _, reason, _ in applied.rejected)
