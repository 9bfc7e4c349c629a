"""What the config says about the mix."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Seed of every choice; share of the conversation groups held out; rows of one output shard; the longest row in tokens;
    similarity from which prompts of two data sets are near duplicates; words in a run that a benchmark prompt must not share;
    share of each data set's conversation groups that is taken, 1 where it is not named. None switches a filter off.
    """

    seed: int
    eval_share: float
    rows_per_shard: int
    max_tokens: int | None
    near_duplicates: float | None
    shared_words: int | None
    weights: Mapping[str, float]

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Settings":
        """From the config slice of a job; `off` is False in YAML."""
        merge = settings["merge"]
        return cls(
            seed=settings["seed"],
            eval_share=merge["eval_share"],
            rows_per_shard=merge["rows_per_shard"],
            max_tokens=merge["max_tokens"] or None,
            near_duplicates=merge["near_duplicates"] or None,
            shared_words=merge["shared_words"] or None,
            weights=settings["weights"],
        )
