"""The page that `python -m scripts.inspect_source` shows."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median_low
from typing import Any

import yaml

from scripts.lib.chat.template import ChatTemplate
from scripts.lib.formats.detecting import labels
from scripts.lib.formats.record import encodable
from scripts.lib.formats.settings import DatasetSettings
from scripts.lib.inspecting import profile
from scripts.lib.inspecting.proposing import Applied, apply, counted, dataset_name, mapping, proposal
from scripts.lib.inspecting.sampling import Sample, Size, pinned_revision, sample_source
from scripts.lib.sources.settings import SourceSettings

SHOWN = 12
WIDTH = 100
ROWS_SHOWN = 3


def inspect(settings: SourceSettings, size: Size, folder: Path, target: Path | None = None, show_rows: bool = False) -> str:
    """Look at a source: columns, labels, patterns, lengths, scripts, duplicates, and the entry that would read it.

    Lengths are in tokens of the `target`'s tokenizer, in characters without one. Raises StageError when no column is known.
    """
    if settings.address.kind == "hub":
        settings = replace(settings, revision=pinned_revision(settings.address.locator, settings.revision))
    sample = sample_source(settings, size, folder)
    unit, count = ("characters", len) if target is None else ("tokens", ChatTemplate.load(target).count)
    lines = [*columns_page(sample), ""]
    entry, _ = mapping(sample.records, settings.text)
    applied = apply(sample.records, entry, settings.seed)
    prompts, wholes = profile.lengths(applied.conversations, count)
    lines += [*chat_page(sample, entry, applied), *length_page(unit, prompts, wholes), *copies_page(applied), ""]
    entry, notes = proposal(settings, sample, median_low(wholes) if wholes else 0, unit)
    lines += stanza(dataset_name(settings.address.locator), entry, notes)
    if show_rows:
        lines += ["", *rows_page(apply(sample.records, entry, settings.seed))]
    return encodable("\n".join(lines))


def columns_page(sample: Sample) -> Iterator[str]:
    """Size and columns."""
    whole = "all" if sample.complete else "the first"
    yield f"{len(sample.records):,} records looked at, of {whole} {sample.seen:,}"
    for cut in sample.cuts:
        yield f"{cut.file} ends inside a record at byte {cut.byte_offset:,}, after {cut.records:,} whole ones"
    for column in profile.column_profiles(sample.records):
        yield f"  {column.name}: {column.kind}; null {column.nulls}, empty {column.empty}; e.g. {shortened(column.example)}"


def chat_page(sample: Sample, entry: Mapping[str, Any], applied: Applied) -> Iterator[str]:
    """Labels, patterns and scripts."""
    dataset = DatasetSettings.of({"dataset": {**entry, "roles": {}}, "name": "source", "seed": 0})
    yield f"labels: {ranked(labels(sample.records, dataset.columns))}"
    patterns = Counter(profile.pattern([message.role for message in conversation.messages]) for conversation in applied.conversations)
    yield f"turns: {ranked(patterns)}"
    yield f"scripts: {ranked(profile.scripts(applied.conversations))}"


def length_page(unit: str, prompts: Sequence[int], wholes: Sequence[int]) -> Iterator[str]:
    """Lengths of prompts and conversations."""
    yield f"first prompt in {unit}: {profile.quantiles(prompts)}"
    yield f"conversation in {unit}: {profile.quantiles(wholes)}"


def copies_page(applied: Applied) -> Iterator[str]:
    """Duplicates and repeated ids."""
    exact, near = profile.duplicates(applied.conversations)
    ids = Counter(conversation.own_id for conversation in applied.conversations if conversation.own_id is not None)
    groups = {conversation.group for conversation in applied.conversations if conversation.group is not None}
    yield f"likely duplicates: {exact} ask the same as an earlier record, {near} nearly the same"
    yield f"ids: {len(ids)} distinct, {sum(count > 1 for count in ids.values())} repeated; groups: {len(groups)}"


def stanza(name: str, entry: Mapping[str, Any], notes: Sequence[str]) -> list[str]:
    """The entry as lines of YAML, ready for the config."""
    text = yaml.safe_dump({"datasets": {name: dict(entry)}}, sort_keys=False, default_flow_style=None, width=WIDTH, allow_unicode=True)
    return [*(f"# {note}" for note in notes), *text.rstrip().splitlines()]


def rows_page(applied: Applied) -> Iterator[str]:
    """The first rows, and every reason for a rejection with an example."""
    yield f"{len(applied.conversations)} rows, {len(applied.rejected)} rejected"
    for conversation in applied.conversations[:ROWS_SHOWN]:
        tools = ", with tools" if conversation.tools else ""
        yield f"row id {conversation.own_id or conversation.side_hash}, group {conversation.group or 'its own'}{tools}"
        for message in conversation.messages[:SHOWN]:
            said = message.content or message.tool_calls or "(to be written)"
            thought = f" [thought: {shortened(message.reasoning_content)}]" if message.reasoning_content else ""
            yield f"  {message.role}:{thought} {shortened(said)}"
    for reason, count in counted(applied).most_common():
        number, value = next((number, value) for number, found, value in applied.rejected if found == reason)
        yield f"rejected {count}: {reason}; e.g. record {number} of those looked at: {shortened(value)}"


def ranked(counts: Counter[str]) -> str:
    """The most frequent entries with their counts."""
    return ", ".join(f"{name} {count}" for name, count in counts.most_common(SHOWN)) or "none"


def shortened(text: str) -> str:
    """`text` on one line, at most `WIDTH` characters."""
    line = " ".join(text.split())
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"
