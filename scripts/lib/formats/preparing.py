"""Stage prepare: the rows of one dataset or benchmark task."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.lib.chat.template import ChatTemplate
from scripts.lib.formats.choosing import Choice, choose
from scripts.lib.formats.detecting import detected
from scripts.lib.formats.refusing import check_yield
from scripts.lib.formats.registry import DETECT
from scripts.lib.formats.scanning import Reader, Scan, head_records, scan
from scripts.lib.formats.settings import DatasetSettings
from scripts.lib.formats.tables import write_rejected, write_rows
from scripts.lib.ground.manifest import Counts, Manifest, checked_shard, read_manifest
from scripts.lib.ground.stage import Job, Result

log = logging.getLogger(__name__)


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
    share = rejection_share(found, choice)
    write_rejected(folder, rejected)
    check_yield(reader, found, len(choice.rows), reasons, share)
    shards = write_rows(folder, choice.rows)
    facts = {
        "format": dataset.format,
        "columns": dict(dataset.columns),
        "kind": dataset.kind,
        "partition": dataset.partition,
        "licence": raw.facts["licence"],
        "rejection_share": round(share, 4),
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
        found = detected(head_records(paths))
        dataset |= found | {"columns": {**found["columns"], **dataset.get("columns", {})}}
        log.info("detected format %s, columns %s", dataset["format"], dataset["columns"])
    return {**settings, "dataset": dataset}


def rejection_share(found: Scan, choice: Choice) -> float:
    """Share of records that would be rejected if all were looked at: the second pass stands for those not sampled."""
    if not found.records:
        return 0.0
    passed_scan = (len(found.order) + found.same_group) / found.records
    looked_at = len(choice.rows) + len(choice.rejected)
    return 1.0 - passed_scan * (len(choice.rows) / looked_at if looked_at else 1.0)
