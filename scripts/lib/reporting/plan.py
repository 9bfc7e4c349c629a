"""What became of every row, and what each stage took."""

from collections.abc import Mapping
from dataclasses import dataclass

from scripts.lib.reporting.published import Published, Run
from scripts.lib.reporting.table import MISSING, Table, number, size

STEPS = ("raw", "prepared", "responses", "token rows", "merged")


@dataclass(frozen=True)
class DatasetRows:
    """One dataset on its way: rows after each of STEPS (None where a step is skipped), tokens and trained tokens of the mix."""

    name: str
    source: str
    licence: str
    rows: Mapping[str, int | None]
    tokens: int
    trained_tokens: int
    eval_rows: int


def dataset_rows(run: Run) -> list[DatasetRows]:
    """Every dataset of the run, by name."""
    return [one_dataset(run, part) for part in run.parts["prepared"]]


def one_dataset(run: Run, prepared: Published) -> DatasetRows:
    """The dataset whose prepared rows are given. A native dataset has no responses; its turns are its own."""
    raw, responses, tokens = (run.find(flag, prepared.name) for flag in ("raw", "responses", "tokens"))
    mixed = run.one("merged").manifest.facts["datasets"].get(prepared.name, {})
    rows = {
        "raw": prepared.manifest.counts.rows_in,
        "prepared": prepared.manifest.counts.rows_out,
        "responses": responses.manifest.counts.rows_out if responses else None,
        "token rows": tokens.manifest.facts["rows"] if tokens else None,
        "merged": mixed.get("rows", 0),
    }
    facts = raw.manifest.facts if raw else {}
    figures = (mixed.get(name, 0) for name in ("tokens", "trained_tokens", "eval_rows"))
    return DatasetRows(prepared.name, facts.get("source", MISSING), facts.get("licence") or "not stated", rows, *figures)


def data_table(rows: list[DatasetRows]) -> Table:
    """Datasets from raw rows to the mix, with their sum."""
    header = ["dataset", "source", "licence", *STEPS, "of them held out", "tokens", "trained tokens"]
    lines = [
        [
            row.name,
            row.source,
            row.licence,
            *(number(row.rows[step]) for step in STEPS),
            *(number(value) for value in (row.eval_rows, row.tokens, row.trained_tokens)),
        ]
        for row in rows
    ]
    sums = [sum(row.rows[step] or 0 for row in rows) for step in STEPS]
    sums += [sum(values) for values in zip(*((row.eval_rows, row.tokens, row.trained_tokens) for row in rows), strict=True)]
    return Table(header, [*lines, ["all", "", "", *map(number, sums)]], ("dataset", "source", "licence"))


def rejected_table(run: Run) -> Table:
    """Every reason for which a stage left rows out."""
    lines = [
        [stage, part.name, reason, number(count), number(part.manifest.counts.rows_in)]
        for stage, part in run
        for reason, count in sorted(part.manifest.counts.rejected.items())
    ]
    return Table(["stage", "of", "reason", "left out", "out of"], lines, ("stage", "of", "reason"))


def cost_table(run: Run) -> Table:
    """Work and cost of every job. A resumed job knows the seconds of its last attempt only, which make no rate, as none at all do."""
    header = ["stage", "of", "rows in", "rows out", "tokens", "bytes", "seconds", "rows/s", "tokens/s", "peak memory"]
    lines = [cost_line(stage, part) for stage, part in run]
    total = sum(part.cost["seconds"] for _, part in run)
    size_sum = size(sum(part.bytes for _, part in run))
    peak = size(max(part.cost["peak_memory_bytes"] for _, part in run))
    return Table(header, [*lines, ["all", "", "", "", "", size_sum, number(total, 1), "", "", peak]], ("stage", "of"))


def cost_line(stage: str, part: Published) -> list[str]:
    """One job. A stage's own count of tokens, such as those trained on, goes before that of its files."""
    counts, seconds = part.manifest.counts, part.cost["seconds"]
    tokens = part.cost.get("trained_tokens", part.tokens) or None
    resumed = part.cost["resumed"]
    per_second = (None, None) if resumed or not seconds else (counts.rows_in / seconds, tokens / seconds if tokens else None)
    return [
        stage,
        part.name,
        number(counts.rows_in),
        number(counts.rows_out),
        number(tokens),
        size(part.bytes),
        number(seconds, 1) + (" (resumed)" if resumed else ""),
        *(number(value, 1) for value in per_second),
        size(part.cost["peak_memory_bytes"]),
    ]
