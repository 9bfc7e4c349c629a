"""What the mix is made of, as figures and as a page."""

from collections.abc import Sequence

import polars as pl

COLUMNS = {
    "rows_in": "rows in",
    "too_long": "too long",
    "weight": "left out by weight",
    "contaminated": "contaminated",
    "duplicate": "duplicates",
    "near_duplicate": "near duplicates",
    "train_rows": "train rows",
    "eval_rows": "eval rows",
    "tokens": "tokens",
    "trained_tokens": "trained tokens",
}
REASONS = ("too_long", "weight", "contaminated", "duplicate", "near_duplicate")


def mix_by_dataset(chosen: pl.DataFrame, taken: pl.DataFrame) -> pl.DataFrame:
    """One row per data set, by name: the columns `COLUMNS`, `rows` of both splits, and `share` of the trained tokens.

    `chosen` holds every token row with the reason why it is left out, `taken` those of the mix with their `split`.
    """
    kind = pl.col("reason").str.split(":").list.first()
    counts = [(kind == reason).sum().cast(pl.Int64).alias(reason) for reason in REASONS]
    read = chosen.group_by("dataset").agg(pl.len().cast(pl.Int64).alias("rows_in"), *counts)
    splits = [(pl.col("split") == split).sum().cast(pl.Int64).alias(f"{split}_rows") for split in ("train", "eval")]
    figures = taken.group_by("dataset").agg(
        pl.len().cast(pl.Int64).alias("rows"), *splits, pl.col("tokens").sum(), pl.col("trained_tokens").sum()
    )
    table = read.join(figures, on="dataset", how="left").fill_null(0).sort("dataset")
    share = (pl.col("trained_tokens") / pl.col("trained_tokens").sum()).round(6)
    return table.with_columns(share=share).select("dataset", "rows", *COLUMNS, "share")


def contamination(chosen: pl.DataFrame) -> dict[str, dict[str, int]]:
    """Task to data set to the rows that repeat one of its prompts."""
    found = chosen.filter(pl.col("reason").str.starts_with("contaminated:"))
    counts = found.group_by(task=pl.col("reason").str.strip_prefix("contaminated:"), dataset="dataset").len().sort("task", "dataset")
    result: dict[str, dict[str, int]] = {}
    for task, dataset, rows in counts.select("task", "dataset", "len").iter_rows():
        result.setdefault(task, {})[dataset] = rows
    return result


def mix_page(table: pl.DataFrame, chosen: pl.DataFrame, heading: Sequence[str]) -> str:
    """The mix as a Markdown page: `heading`, one line per data set and a sum, and the rows that repeat benchmark prompts."""
    names = ["data set", *COLUMNS.values(), "share"]
    lines = ["# Training mix", "", *heading, "", f"| {' | '.join(names)} |", f"|---|{'---:|' * (len(names) - 1)}"]
    total = table.select(pl.lit("all").alias("dataset"), *(pl.col(name).sum() for name in table.columns[1:]))
    for row in pl.concat([table, total]).iter_rows(named=True):
        figures = [f"{row[name]:,}" for name in COLUMNS]
        lines.append(f"| {' | '.join([row['dataset'], *figures])} | {row['share']:.1%} |")
    found = contamination(chosen)
    if found:
        lines += ["", "| benchmark task | data set | rows that repeat its prompts |", "|---|---|---:|"]
        lines += [f"| {task} | {dataset} | {rows:,} |" for task, datasets in found.items() for dataset, rows in datasets.items()]
    return "\n".join(lines) + "\n"
