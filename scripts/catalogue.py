"""Write docs/datasets.md from configs/catalogue.yaml, so that the page and the stanzas cannot differ."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
SOURCE, PAGE = ROOT / "configs/catalogue.yaml", ROOT / "docs/datasets.md"
FACTS = ("rows", "licence", "generator", "format", "defects")
HEAD = """\
# Datasets for training drafters

Made by `python -m scripts.catalogue` from `configs/catalogue.yaml`, which also holds a ready `datasets:` stanza for each: copy
it into a config, and see with `python -m scripts.inspect_source` what it makes of the rows.

A drafter learns what its target writes, so in most sets **only the prompts serve** and the target answers anew. In those marked
*answers* the target or its family wrote the answers. A fact with a question mark is unverified: from memory or inferred, to be
looked up before it counts. All others were read in cards, or in public code and records that count or quote them. A licence is
that of the set as found, not legal advice: the answers of closed models, and the code quoted, may carry terms of their own.
"""
COLUMNS = ("dataset", "rows", "licence", "written by", "format", "serves", "relevance", "known defects")


def page(catalogue: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """The whole page: a table for each category."""
    parts = [HEAD]
    for category, entries in catalogue.items():
        parts += [f"## {category.capitalize()}\n", table(entries)]
    return "\n".join(parts)


def table(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """One category; facts in the order of COLUMNS."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(row(name, entry) for name, entry in entries.items())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def row(name: str, entry: Mapping[str, Any]) -> list[str]:
    """One dataset."""
    repository = entry["stanza"]["source"].removeprefix("hub:")
    rows, licence, generator, shape, defects = (fact(entry[key]) for key in FACTS)
    return [f"`{name}` {repository}", rows, licence, generator, shape, entry["serves"], entry["relevance"], defects]


def fact(value: Mapping[str, str]) -> str:
    """A fact as text; a question mark stands for what was not verified."""
    ((status, text),) = value.items()
    return str(text) if status == "read" else f"{text} (?)"


if __name__ == "__main__":
    PAGE.write_text(page(yaml.safe_load(SOURCE.read_text())))
