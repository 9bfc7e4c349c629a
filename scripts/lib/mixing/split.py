"""Which rows are held out: decided by hashes of what the rows say, not by their number or their order."""

import hashlib
from collections.abc import Iterator

import polars as pl

from scripts.lib.ground.errors import StageError


def seeded_hash(seed: int, *parts: str) -> int:
    """64 bits that depend on `seed` and `parts` alone, the same in every process and on every machine."""
    text = "\x1f".join([str(seed), *parts])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def with_split(index: pl.DataFrame, seed: int, eval_share: float) -> pl.DataFrame:
    """`index` with a column `split`: `train` or `eval`.

    A row's key is the smallest prompt hash among all rows tied to it, where rows of one conversation group, and rows of
    one first user turn, are tied. Tied rows so share their split, and a further data set moves a row only if one of its
    own groups ties prompts together that nothing tied before. Raises StageError when a split has no row.
    """
    keys = tied_keys(index)
    limit = eval_share * 2**64
    held_out = [seeded_hash(seed, "split", key) < limit for key in keys]
    result = index.with_columns(split=pl.Series(["eval" if held else "train" for held in held_out], dtype=pl.String))
    for name, direction in (("train", "lower"), ("eval", "raise")):
        if name not in result["split"]:
            raise StageError(
                f"no {name} rows: all {len(set(keys))} independent conversation groups fell into the other split at "
                f"merge.eval_share {eval_share}; {direction} it, give more data, or choose another seed"
            )
    return result


def tied_keys(index: pl.DataFrame) -> list[str]:
    """Each row's key: the smallest prompt hash that a chain of shared groups and shared prompts leads to."""
    parents: dict[str, str] = {}
    for first, *others in prompts_of_mixed_groups(index):
        for other in others:
            unite(parents, first, other)
    return [root(parents, prompt) if parents else prompt for prompt in index["prompt_hash"]]


def prompts_of_mixed_groups(index: pl.DataFrame) -> Iterator[list[str]]:
    """The prompt hashes of every group that holds several; a group belongs to its data set."""
    prompts = index.group_by("dataset", "group", maintain_order=True).agg(pl.col("prompt_hash").unique().sort())
    yield from prompts.filter(pl.col("prompt_hash").list.len() > 1)["prompt_hash"].to_list()


def root(parents: dict[str, str], node: str) -> str:
    """The smallest member of the set of `node`; shortens the way there."""
    while (parent := parents.get(node, node)) != node:
        parents[node] = node = parents.get(parent, parent)
    return node


def unite(parents: dict[str, str], one: str, other: str) -> None:
    """Make one set of the sets of `one` and `other`."""
    small, large = sorted((root(parents, one), root(parents, other)))
    parents[large] = small
