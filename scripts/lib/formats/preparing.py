"""Stage prepare: the rows of one dataset or benchmark task."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.lib.chat.template import ChatTemplate
from scripts.lib.formats.choosing import choose, rejection_share
from scripts.lib.formats.detecting import detected
from scripts.lib.formats.refusing import check_yield
from scripts.lib.formats.registry import DETECT
from scripts.lib.formats.scanning import Reader, head_records, scan
from scripts.lib.formats.settings import DatasetSettings
from scripts.lib.formats.tables import write_rejected, write_rows
from scripts.lib.ground.manifest import Counts, Manifest, checked_shard, read_manifest
from scripts.lib.ground.stage import Job, Result

log = logging.getLogger(__name__)
FEW_ROWS = 20  # no group of so few rows is worth a warning


def prepare(job: Job, folder: Path) -> Result:
    """Read the raw records twice: once to sort out what needs no tokenizer, once to tokenise what is sampled."""
    raw = read_manifest(job.input("raw"), "fetch")
    read_manifest(job.input("target"), "target")
    template = ChatTemplate.load(job.input("target").parent)
    paths = [checked_shard(job.input("raw").parent, shard) for shard in raw.shards]
    dataset = DatasetSettings.of(settled(job.settings, paths))
    reader = Reader(paths, dataset)
    found = scan(reader, template)
    log.info("%s records, %s candidates", f"{found.records:,}", f"{len(found.order):,}")
    choice = choose(found, reader, template)
    rejected = [*found.rejected, *choice.rejected]
    reasons = dict(sorted(Counter(reason for _, reason, _ in rejected).items()))
    listed = write_rejected(folder, rejected)
    check_yield(reader, found, choice, reasons, listed)
    warn_of_one_group(dataset.name, choice.rows)
    shards = write_rows(folder, choice.rows)
    facts = {
        "format": dataset.format,
        "columns": dict(dataset.columns),
        "kind": dataset.kind,
        "partition": dataset.partition,
        "licence": raw.facts["licence"],
        "rejection_share": round(rejection_share(found, choice), 4),
        "truncated": [asdict(cut) for cut in found.cuts],
        "leading_messages_dropped": found.leading_messages_dropped,
        "tools_dropped": found.tools_dropped,
        "chat_template_sha256": template.digest,
    }
    counts = Counts(found.records, len(choice.rows), {**reasons, **({"not_sampled": choice.not_sampled} if choice.not_sampled else {})})
    return Result(Manifest("prepare", job.settings, job.input_digests(), counts, shards, facts), {"records": found.records})


def settled(settings: Mapping[str, Any], paths: Sequence[Path]) -> dict[str, Any]:
    """`settings` with format and columns found from the first records where the format is `detect`; columns of the config stay."""
    dataset = dict(settings["dataset"])
    if dataset["format"] == DETECT:
        found = detected(head_records(paths), settings["name"])
        dataset |= found | {"columns": {**found["columns"], **dataset.get("columns", {})}}
        log.info("detected format %s, columns %s", dataset["format"], dataset["columns"])
    return {**settings, "dataset": dataset}


def warn_of_one_group(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Say it when most rows are of one group: they fall into one split together, which is rarely meant."""
    ((group, size),) = Counter(row["group"] for row in rows).most_common(1)
    if size > max(len(rows) // 2, FEW_ROWS):
        log.warning(
            "%s: %s of %s rows are of group %r; if they are no one conversation, set columns: {group: …}", name, size, len(rows), group
        )
