"""Stage prepare: the rows of one dataset or benchmark task."""

import logging
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from scripts.lib.chat.template import ChatTemplate
from scripts.lib.formats.choosing import Choice, choose
from scripts.lib.formats.scanning import Reader, Scan, scan
from scripts.lib.formats.settings import DatasetSettings
from scripts.lib.formats.tables import write_rejected, write_rows
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import Counts, Manifest, checked_shard, read_manifest
from scripts.lib.ground.stage import Job, Result

log = logging.getLogger(__name__)
SHOWN = 20


def prepare(job: Job, folder: Path) -> Result:
    """Read the raw records twice: once to sort out what needs no tokenizer, once to tokenise what is sampled."""
    dataset = DatasetSettings.of(job.settings)
    raw = read_manifest(job.input("raw"), "fetch")
    read_manifest(job.input("target"), "target")
    template = ChatTemplate.load(job.input("target").parent)
    reader = Reader([checked_shard(job.input("raw").parent, shard) for shard in raw.shards], dataset)
    found = scan(reader, template)
    log.info("%s records, %s candidates", f"{found.records:,}", f"{len(found.candidates):,}")
    choice = choose(found.candidates, reader, template)
    rejected = [*found.rejected, *choice.rejected]
    reasons = dict(sorted(Counter(reason for _, reason, _ in rejected).items()))
    share = rejection_share(found, choice)
    check_yield(dataset, found, choice, reasons, share)
    write_rejected(folder, rejected)
    shards = write_rows(folder, choice.rows)
    facts = {
        "format": dataset.format,
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


def rejection_share(found: Scan, choice: Choice) -> float:
    """Share of records that would be rejected if all were looked at: the second pass stands for those not sampled."""
    if not found.records:
        return 0.0
    passed_scan = len(found.candidates) / found.records
    looked_at = len(choice.rows) + len(choice.rejected)
    return 1.0 - passed_scan * (len(choice.rows) / looked_at if looked_at else 1.0)


def check_yield(dataset: DatasetSettings, found: Scan, choice: Choice, reasons: dict[str, int], share: float) -> None:
    """Raise StageError with what was seen and what was expected when too few rows or too large a share passed."""
    rows, wanted = len(choice.rows), dataset.samples or 1
    if rows < wanted:
        problem = f"{rows} of {wanted} rows wanted"
        remedy = f"correct the mapping or `max_prompt_tokens`, or set `samples` to {rows} or less" if rows else "correct the mapping"
    elif dataset.max_rejected is not None and share > dataset.max_rejected:
        problem = f"rejection share {share:.3f} is over max_rejected {dataset.max_rejected}"
        remedy = "correct the mapping, or raise `max_rejected`"
    else:
        return
    raise StageError(f"{dataset.name}: {problem} from {found.records} records; {described(dataset, found, reasons)}; {remedy}")


def described(dataset: DatasetSettings, found: Scan, reasons: dict[str, int]) -> str:
    """Columns and rejections seen beside the mapping in force."""
    columns = ", ".join(name for name, _ in found.columns.most_common(SHOWN)) or "none"
    rejections = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1])[:SHOWN]) or "none"
    mapping = ", ".join(f"{name}: {column}" for name, column in dataset.columns.items())
    roles = f", roles {{{', '.join(f'{label}: {role}' for label, role in dataset.roles.items())}}}" if dataset.roles else ""
    return f"columns seen: {columns}; rejected: {rejections}; expected: format {dataset.format}, columns {{{mapping}}}{roles}"
