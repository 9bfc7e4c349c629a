"""What the mix is made of, as figures and as a page."""

import polars as pl


def mix_by_dataset(rows: pl.DataFrame) -> pl.DataFrame:
    """One row per data set, by name: rows, tokens, trained tokens, share of the trained tokens, rows held out."""
    figures = [
        pl.len().cast(pl.Int64).alias("rows"),
        pl.col("tokens").sum(),
        pl.col("trained_tokens").sum(),
        (pl.col("split") == "eval").sum().cast(pl.Int64).alias("eval_rows"),
    ]
    table = rows.group_by("dataset").agg(figures).sort("dataset")
    share = (pl.col("trained_tokens") / pl.col("trained_tokens").sum()).round(6)
    return table.with_columns(share=share).select("dataset", "rows", "tokens", "trained_tokens", "share", "eval_rows")


def mix_page(table: pl.DataFrame, seed: int, eval_share: float, duplicates: int) -> str:
    """The mix as a Markdown page with one line per data set and a sum."""
    lines = [
        "# Training mix",
        "",
        f"Seed {seed}, eval share {eval_share}, {duplicates:,} duplicate rows left out. Share is of the trained tokens.",
        "",
        "| data set | rows | tokens | trained tokens | share | eval rows |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    total = table.select(pl.lit("all").alias("dataset"), *(pl.col(name).sum() for name in table.columns[1:]))
    for name, rows, tokens, trained, share, held_out in [*table.iter_rows(), *total.iter_rows()]:
        lines.append(f"| {name} | {rows:,} | {tokens:,} | {trained:,} | {share:.1%} | {held_out:,} |")
    return "\n".join(lines) + "\n"
