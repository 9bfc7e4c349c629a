"""Which token rows the mix takes, and why it does not take the others.

Every decision depends on what the rows and the benchmark prompts say and on the seed, never on the order of data sets or files.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from scripts.lib.chat.near import Entry, NearIndex, bands, meeting
from scripts.lib.ground.errors import StageError
from scripts.lib.mixing.contamination import TaskPrompts
from scripts.lib.mixing.conversations import all_prompts
from scripts.lib.mixing.settings import Settings
from scripts.lib.mixing.split import seeded_hash

CONVERSATION = ("dataset", "conversation")
REASON = {"reason": pl.String, "value": pl.String}


def choose(index: pl.DataFrame, prepared: Sequence[Path], tasks: Sequence[Path], settings: Settings) -> pl.DataFrame:
    """`index` with columns `reason` and `value`, null in the rows that are taken.

    A row gets the first reason that holds: too_long, weight, contaminated:<task>, duplicate, near_duplicate.
    Of duplicates, a native one goes before one whose answer was made anew, then the smaller seeded hash decides.
    Raises StageError when two rows of one data set have one id.
    """
    check_ids(index)
    asked = conversations(prepared, tasks, settings)
    rows = of_conversations(index, asked)
    rows = ranked(rows.join(asked, on=CONVERSATION, how="left"), settings.seed)
    rows = too_long(rows, settings.max_tokens)
    rows = by_weight(rows, settings)
    rows = contaminated(rows)
    rows = repeated(rows)
    return repeated_prompts(rows, settings.near_duplicates).select(*index.columns, *REASON)


def check_ids(index: pl.DataFrame) -> None:
    """Raise StageError when two rows of one data set have one id."""
    twice = index.filter(pl.struct("dataset", "id").is_duplicated()).sort("dataset", "id")
    if twice.height:
        raise StageError(
            f"data set {twice['dataset'][0]}: id {twice['id'][0]} names several token rows; "
            "give the source's rows unique ids (a source id must not end in #<turn>) and run again"
        )


def conversations(prepared: Sequence[Path], tasks: Sequence[Path], settings: Settings) -> pl.DataFrame:
    """One row per prepared conversation: its kind, hashes and signature, and the benchmark prompt that it repeats."""
    found = TaskPrompts.read(tasks if settings.shared_words else [], settings.shared_words or 1, settings.near_duplicates)
    tables = [found.mark(table) for table in all_prompts(prepared)]
    return pl.concat(tables).rename({"source": "dataset", "id": "conversation"}).drop("group", "prompt_hash")


def of_conversations(index: pl.DataFrame, asked: pl.DataFrame) -> pl.DataFrame:
    """`index` with the column `conversation`: the prepared row's id, to which a row that starts at a later turn adds the turn.

    Raises StageError when there is no such prepared row.
    """
    known = asked.select(*CONVERSATION, known=pl.lit(True))
    rows = index.join(known.rename({"conversation": "id"}), on=["dataset", "id"], how="left")
    own = pl.when(pl.col("known").is_null()).then(pl.col("id").str.replace(r"#\d+$", "")).otherwise("id")
    rows = rows.with_columns(conversation=own).drop("known")
    lost = rows.join(known, on=CONVERSATION, how="anti").sort("dataset", "id")
    if lost.height:
        raise StageError(
            f"data set {lost['dataset'][0]}: token row {lost['id'][0]} has no prepared row; its token rows are of other prepared rows, "
            "delete their manifest and run again"
        )
    return rows


def ranked(rows: pl.DataFrame, seed: int) -> pl.DataFrame:
    """`rows` without reasons yet, in the order in which the first of several duplicates is kept."""
    order = [seeded_hash(seed, "duplicate", *names) for names in rows.select(*CONVERSATION).iter_rows()]
    reasons = [pl.lit(None, dtype=dtype).alias(name) for name, dtype in REASON.items()]
    made = (pl.col("kind") != "native").alias("made")
    ordered = rows.with_columns(pl.Series("order", order, dtype=pl.UInt64), made, *reasons)
    return ordered.sort("made", "order", *CONVERSATION, "id")


def reject(rows: pl.DataFrame, which: pl.Expr, reason: str | pl.Expr, value: pl.Expr) -> pl.DataFrame:
    """`rows` with `reason` and `value` where `which` holds and no reason was given before."""
    new = which & pl.col("reason").is_null()
    text = pl.lit(reason) if isinstance(reason, str) else reason
    return rows.with_columns(
        reason=pl.when(new).then(text).otherwise("reason"), value=pl.when(new).then(value.cast(pl.String)).otherwise("value")
    )


def too_long(rows: pl.DataFrame, max_tokens: int | None) -> pl.DataFrame:
    """Reject rows of more than `max_tokens`."""
    return rows if max_tokens is None else reject(rows, pl.col("tokens") > max_tokens, "too_long", pl.col("tokens"))


def by_weight(rows: pl.DataFrame, settings: Settings) -> pl.DataFrame:
    """Reject the groups whose seeded hash lies beyond their data set's weight: a smaller weight takes a part of what a larger one takes."""
    for dataset, weight in sorted(settings.weights.items()):
        groups = rows.filter(dataset=dataset)["group"].unique().sort().to_list()
        out = [group for group in groups if seeded_hash(settings.seed, "weight", dataset, group) >= weight * 2**64]
        rows = reject(rows, (pl.col("dataset") == dataset) & pl.col("group").is_in(out), "weight", pl.lit(weight))
    return rows


def contaminated(rows: pl.DataFrame) -> pl.DataFrame:
    """Reject what repeats a benchmark prompt."""
    return reject(rows, pl.col("task").is_not_null(), pl.concat_str(pl.lit("contaminated:"), "task"), pl.col("repeats"))


def repeated(rows: pl.DataFrame) -> pl.DataFrame:
    """Reject all but the first of the rows with equal token ids."""
    left = rows.filter(pl.col("reason").is_null()).group_by("digest", maintain_order=True)
    first = left.agg(first_dataset=pl.col("dataset").first(), first_id=pl.col("id").first())
    rows = rows.join(first, on="digest", how="left", maintain_order="left")
    other = (pl.col("dataset") != pl.col("first_dataset")) | (pl.col("id") != pl.col("first_id"))
    return reject(rows, other, "duplicate", pl.concat_str("first_dataset", pl.lit("/"), "first_id"))


def repeated_prompts(rows: pl.DataFrame, threshold: float | None) -> pl.DataFrame:
    """Reject conversations that ask what one of another data set asks, or from `threshold` on nearly that.

    Within a data set, stage `prepare` has decided which rows are copies; what it left may share a form of words by nature.
    """
    left = rows.filter(pl.col("reason").is_null()).unique(CONVERSATION, keep="first", maintain_order=True)
    first: dict[int, Entry] = {}
    index = NearIndex(threshold or 1)
    found = []
    for entry, asked in zip(entries(left, threshold), left["asked_hash"], strict=True):
        name = entry.name.removeprefix(f"{entry.source}/")
        owner = first.get(asked)
        near = index.find(entry)
        if owner and owner.source != entry.source:
            found.append((entry.source, name, "duplicate", owner.name))
        elif near:
            found.append((entry.source, name, "near_duplicate", f"{near[0].name}: similarity {near[1]:.2f}"))
        else:
            first.setdefault(asked, entry)
            index.add(entry)
    schema = {**dict.fromkeys(CONVERSATION, pl.String), "why": pl.String, "of": pl.String}
    rows = rows.join(pl.DataFrame(found, schema=schema, orient="row"), on=CONVERSATION, how="left", maintain_order="left")
    return reject(rows, pl.col("why").is_not_null(), pl.col("why"), pl.col("of"))


def entries(conversations: pl.DataFrame, threshold: float | None) -> Iterator[Entry]:
    """One entry per conversation; those that nothing can be near to, or all without `threshold`, have no bands."""
    signatures = conversations["signature"].to_list()
    hashes = bands(signatures, conversations["later_hash"].to_list(), threshold or 1)
    compared = meeting(hashes) if threshold is not None else np.zeros(len(signatures), dtype=bool)
    for row, (dataset, id_) in enumerate(conversations.select(*CONVERSATION).iter_rows()):
        yield Entry(f"{dataset}/{id_}", dataset, signatures[row], hashes[row].tolist() if compared[row] else ())
