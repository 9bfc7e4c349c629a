"""Finished batches on disk, line by line: what a killed job need not do again.

A batch is appended in one write and fsynced. Its lines carry a checksum each, and the last one says so. What a kill tore, the rest
of an unfinished batch, is cut off when the journal is opened. A bad line before the end was not torn but damaged: an error.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import canonical, sha256_text

log = logging.getLogger(__name__)
Record = Mapping[str, Any]


class Journal:
    """The finished batches by label, and the file that keeps them."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.batches: dict[str, list[Record]] = {}
        if path.exists():
            self._recover(path.read_bytes())

    def append(self, label: str, records: Sequence[Record]) -> None:
        """Keep the finished batch `label` for good before anything else is done."""
        lines = [line(label, record, last=number == len(records)) for number, record in enumerate(records, 1)]
        with self.path.open("ab") as file:
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
        self.batches[label] = list(records)

    def _recover(self, data: bytes) -> None:
        """Read whole batches from `data` and cut the file after the last one."""
        kept = end = 0
        records: list[Record] = []
        lines = data.splitlines(keepends=True)
        for number, raw in enumerate(lines):
            entry = parsed(raw)
            if entry is None:
                if any(rest.strip() for rest in lines[number + 1 :]):
                    raise StageError(f"{self.path}: line {number + 1} of {len(lines)} is damaged; delete the file and start again")
                break
            end += len(raw)
            records.append(entry["record"])
            if entry["last"]:
                self.batches[entry["batch"]], records, kept = records, [], end
        if kept < len(data):
            log.warning("torn_tail: cut %s bytes of an unfinished batch from %s", len(data) - kept, self.path)
            os.truncate(self.path, kept)


def line(label: str, record: Record, last: bool) -> str:
    """One line of the journal."""
    entry = {"batch": label, "last": last, "record": record}
    return canonical({**entry, "check": sha256_text(canonical(entry))[:16]}) + "\n"


def parsed(raw: bytes) -> dict[str, Any] | None:
    """The entry in the whole line `raw`, or None when it is torn or damaged."""
    try:
        entry = json.loads(raw)
        check = entry.pop("check")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return entry if raw.endswith(b"\n") and check == sha256_text(canonical(entry))[:16] else None
