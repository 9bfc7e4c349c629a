"""The config slice of one cell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NGRAM_DRAFT_TOKENS = 12  # SGLang's own choice


@dataclass(frozen=True)
class Settings:
    """Which task with which way to serve, how long answers may be, in which arithmetic, and how often all is timed.

    `drafter` is one of the run's, `path:DIR` or `hub:ORG/NAME` (at `revision`), None for an algorithm without one. `draft_steps` is how
    deep drafts go, `topk` how many branch off at each step, `draft_tokens` how many are verified at once, the newest token among them.
    `cuda_graphs`, `attention_backend` and `flags` hold for the server of the target alone too, speculative flags aside.
    `prompts` bounds how many of the task's prompts are measured; None takes all. `turns` is first or all.
    """

    task: str
    variant: str
    drafter: str | None
    draft_steps: int | None
    dtype: str
    max_tokens: int
    repeats: int
    prompts: int | None = None
    engine: str = "transformers"
    algorithm: str = "EAGLE3"
    topk: int = 1
    draft_tokens: int | None = None
    cuda_graphs: bool = True
    attention_backend: str | None = None
    flags: Sequence[str] = ()
    revision: str | None = None
    concurrency: int = 1
    turns: str = "first"
    seed: int = 0

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Settings":
        """From the settings of a job."""
        return cls(
            task=settings["task_name"],
            variant=settings["variant_name"],
            max_tokens=settings["task"]["max_tokens"],
            turns=settings["task"].get("turns", "first"),
            repeats=settings["repeats"],
            concurrency=settings["concurrency"],
            seed=settings["seed"],
            **{"drafter": None, "draft_steps": None, **settings["variant"]},
        )

    @property
    def served(self) -> bool:
        """Whether SGLang is measured, not the loop in this process."""
        return self.engine == "sglang"

    @property
    def verified(self) -> int:
        """Tokens that the target reads in a verify step: the newest one and the drafts."""
        if self.draft_tokens is not None:
            return self.draft_tokens
        return NGRAM_DRAFT_TOKENS if self.draft_steps is None else self.draft_steps + 1

    @property
    def ceiling(self) -> int:
        """The highest possible accept length: the longest chain of drafts and the bonus token."""
        return self.verified if self.draft_steps is None else min(self.draft_steps + 1, self.verified)
