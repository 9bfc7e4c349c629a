"""Conversations that ask what a benchmark task asks: the same prompt, nearly the same, or a long run of the same words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from scripts.lib.chat.near import Entry, NearIndex, bands
from scripts.lib.chat.signature import runs
from scripts.lib.mixing.conversations import all_prompts, words

TEMPLATE_SHARE = 0.5  # runs of words in more of a task's prompts than this are how the task asks, not what
FILTER_BITS = 22
EMPTY = pl.Schema({"source": pl.String(), "id": pl.String(), "prompt_hash": pl.String(), "signature": pl.Binary(), "asked": pl.String()})


@dataclass(frozen=True)
class TaskPrompts:
    """The prompts of all benchmark tasks, ready to be looked for.

    `runs` u64 [G] are the hashes of their runs of words, ascending, and `owners` i64 [G] the prompt of each, a place in `names`.
    `hashes` has a prompt per `prompt_hash`. Without `threshold`, nothing is compared by signature.
    """

    names: Sequence[str]
    tasks: Sequence[str]
    hashes: Mapping[str, int]
    near: NearIndex
    threshold: float | None
    size: int
    runs: np.ndarray
    owners: np.ndarray

    @classmethod
    def read(cls, manifests: Sequence[Path], size: int, threshold: float | None) -> "TaskPrompts":
        """The prompts behind the prepared `manifests`, for runs of `size` words and similarity from `threshold` on."""
        table = pl.concat([pl.DataFrame(schema=EMPTY), *(part.select(EMPTY.names()) for part in all_prompts(manifests))]).sort(
            "source", "id"
        )
        names = [f"{task}/{id_}" for task, id_ in table.select("source", "id").iter_rows()]
        near = NearIndex(threshold or 1)
        signatures = table["signature"].to_list()
        if threshold is not None and names:
            hashes = bands(signatures, [0] * len(names), threshold).tolist()
            for fields in zip(names, table["source"], signatures, hashes, strict=True):
                near.add(Entry(*fields))
        by_hash = {prompt_hash: place for place, prompt_hash in reversed(list(enumerate(table["prompt_hash"])))}
        return cls(names, table["source"].to_list(), by_hash, near, threshold, size, *telling_runs(table, size))

    def mark(self, table: pl.DataFrame) -> pl.DataFrame:
        """`table`, as `all_prompts` gives it, without the text, but with `task` and `repeats`: what it repeats and how, or null."""
        found = self._by_runs(table["asked"]) | self._by_signature(table["signature"].to_list())
        same = {row: (self.hashes[text], "the same prompt") for row, text in enumerate(table["prompt_hash"]) if text in self.hashes}
        tasks: list[str | None] = [None] * table.height
        repeats: list[str | None] = [None] * table.height
        for row, (place, how) in (found | same).items():
            tasks[row], repeats[row] = self.tasks[place], f"{self.names[place]}: {how}"
        return table.drop("asked").with_columns(pl.Series("task", tasks, pl.String), pl.Series("repeats", repeats, pl.String))

    def _by_signature(self, signatures: Sequence[bytes]) -> dict[int, tuple[int, str]]:
        """Row to the prompt that is nearest to it, a place in `names`, and how near it is."""
        if self.threshold is None or not self.near.buckets:
            return {}
        hashes = bands(signatures, [0] * len(signatures), self.threshold)
        compared = np.flatnonzero(np.isin(hashes, np.array(list(self.near.buckets), dtype=np.uint64)).any(axis=1))
        pairs = [(row, self.near.find(Entry("", "", signatures[row], hashes[row].tolist()))) for row in compared.tolist()]
        return {row: (self.names.index(near[0].name), f"similarity {near[1]:.2f}") for row, near in pairs if near}

    def _by_runs(self, asked: pl.Series) -> dict[int, tuple[int, str]]:
        """Row to the first prompt of which it holds a run of words, a place in `names`, and how long that is."""
        if not len(self.runs):
            return {}
        hashes, lengths = words(asked)
        found, counts = runs(hashes, lengths, self.size)
        known = np.zeros(2**FILTER_BITS, dtype=bool)
        known[self.runs & np.uint64(2**FILTER_BITS - 1)] = True
        maybe = np.flatnonzero(known[found & np.uint64(2**FILTER_BITS - 1)])
        places = np.minimum(np.searchsorted(self.runs, found[maybe]), len(self.runs) - 1)
        hit = self.runs[places] == found[maybe]
        rows = np.repeat(np.arange(len(counts)), counts)[maybe[hit]]
        first: dict[int, int] = {}
        for row, owner in zip(rows.tolist(), self.owners[places[hit]].tolist(), strict=True):
            first[row] = min(owner, first.get(row, owner))
        return {row: (owner, f"a run of {self.size} words") for row, owner in first.items()}


def telling_runs(table: pl.DataFrame, size: int) -> tuple[np.ndarray, np.ndarray]:
    """u64 [G] and i64 [G]: every run of `size` words in the prompts of `table`, ascending, with its first prompt.

    A run that more than `TEMPLATE_SHARE` of a task's prompts hold, and several do, is left out.
    """
    hashes, lengths = words(table["asked"])
    found, counts = runs(hashes, lengths, size)
    owner = np.repeat(np.arange(table.height), counts)
    held = pl.DataFrame({"run": found, "owner": owner, "task": table["source"].gather(owner)}).unique()
    prompts = table.group_by(task="source").len("prompts")
    shared = held.group_by("task", "run").agg(pl.len().alias("holders"), pl.col("owner").min()).join(prompts, on="task")
    template = (pl.col("holders") > 1) & (pl.col("holders") > TEMPLATE_SHARE * pl.col("prompts"))
    kept = shared.filter(~template).group_by("run").agg(pl.col("owner").min()).sort("run")
    return kept["run"].to_numpy(), kept["owner"].to_numpy()
