"""Whether the states fit, asked before the first forward pass, and what would fit if they do not."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.lib.ground.errors import StageError
from scripts.lib.states.rows import ShardPlan
from scripts.lib.states.storing import Storing, every_storing


@dataclass(frozen=True)
class Budget:
    """The room for shards of hidden size H in `folder`: `free` bytes of its disk for missing ones, `most` for all, if not None."""

    folder: Path
    hidden_size: int
    free: int
    most: int | None

    def check(self, plans: Sequence[ShardPlan], missing: Sequence[ShardPlan], storing: Storing) -> None:
        """Raise StageError, which says what would fit, when there is no room for the `missing` of the shards `plans`."""
        need, whole = self.size(missing, storing), self.size(plans, storing)
        if need > self.free:
            room = self.free + whole - need
            problem = f"the missing shards need {need:,} bytes, {self.free:,} are free"
            remedy = "free some space"
        elif self.most is not None and whole > self.most:
            room = self.most
            problem = f"all shards need {whole:,} bytes, hidden.max_bytes allows {self.most:,}"
            remedy = "raise hidden.max_bytes"
        else:
            return
        raise StageError(
            f"{self.folder}: {problem}; what would fit: {', or '.join(self.choices(plans, storing, room))}; {remedy} or choose "
            "one of these, then start again: with unchanged settings finished shards are kept"
        )

    def check_rolling(self, kept: Sequence[ShardPlan], rolled: Sequence[ShardPlan], storing: Storing) -> None:
        """Raise StageError when there is no room for two of the shards `rolled`, which come and go, beside those that are `kept`."""
        largest = sorted(plan.bytes(self.hidden_size, storing) for plan in rolled)[-2:]
        need, limit = self.size(kept, storing) + sum(largest), self.free if self.most is None else min(self.free, self.most)
        if need > limit:
            raise StageError(
                f"{self.folder}: held-out rows and the two largest shards need {need:,} bytes, there is room for {limit:,}; "
                "lower hidden.tokens_per_shard, raise hidden.max_bytes or free some space, then start again"
            )

    def choices(self, plans: Sequence[ShardPlan], storing: Storing, room: int) -> list[str]:
        """Other ways to store the shards `plans` for which there is room, and the tokens that `storing` has `room` for."""
        limit = self.free if self.most is None else min(self.free, self.most)
        sizes = {other: self.size(plans, other) for other in every_storing()}
        fitting = [f"{other} ({size:,} bytes)" for other, size in sizes.items() if size <= limit]
        tokens = sum(plan.tokens for plan in plans)
        fewer = int(tokens * min(room / sizes[storing], 1))
        return [
            *fitting,
            *self.rolling(plans, storing, limit),
            f"about {fewer:,} of the {tokens:,} tokens (fewer samples, or a shorter encode.max_length)",
        ]

    def rolling(self, plans: Sequence[ShardPlan], storing: Storing, limit: int) -> list[str]:
        """Whether shards to train on that come and go would fit: those of held-out rows, and two others at a time."""
        train = sorted((plan.bytes(self.hidden_size, storing) for plan in plans if plan.name.startswith("train-")), reverse=True)
        least = self.size([plan for plan in plans if not plan.name.startswith("train-")], storing) + sum(train[:2])
        return [f"hidden.mode: rolling ({least:,} bytes at a time)"] if train and least <= limit else []

    def size(self, plans: Sequence[ShardPlan], storing: Storing) -> int:
        """Bytes of the shards `plans`."""
        return sum(plan.bytes(self.hidden_size, storing) for plan in plans)
