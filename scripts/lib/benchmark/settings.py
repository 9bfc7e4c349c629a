"""The config slice of one cell."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Which task with which drafter, how long answers and chains may be, in which arithmetic, and how often all is timed.

    `prompts` bounds how many of the task's prompts are measured; None takes all.
    """

    task: str
    variant: str
    drafter: str
    draft_steps: int
    dtype: str
    max_tokens: int
    repeats: int
    prompts: int | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Settings":
        """From the settings of a job."""
        return cls(
            task=settings["task_name"],
            variant=settings["variant_name"],
            max_tokens=settings["task"]["max_tokens"],
            repeats=settings["repeats"],
            **settings["variant"],
        )

    @property
    def ceiling(self) -> int:
        """The highest possible accept length: every draft and the bonus token."""
        return self.draft_steps + 1
