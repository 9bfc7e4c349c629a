"""Where a training gets its rows from: from shards that are all there, or (`rolling.py`) from shards that come and go."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from scripts.lib.eagle3.closed_form import Sample
from scripts.lib.states.encoded import decoded
from scripts.lib.training import ranks
from scripts.lib.training.batches import TrainingRow
from scripts.lib.training.rows import RowSet
from scripts.lib.training.schedule import PlannedStep, row_order
from scripts.lib.training.settings import TrainSettings
from scripts.lib.training.stepping import Stepper


class Feed(Protocol):
    """The rows to train on."""

    @property
    def found(self) -> RowSet:
        """All of them, maybe without states: they say how long each is."""
        ...

    def samples(self) -> Iterator[Sample]:
        """What the first rows hold, for a start that is solved from them."""
        ...

    def load(self, stepper: Stepper, steps: Sequence[PlannedStep]) -> Iterator[Any]:
        """The batches of this rank in `steps`, in order, made by `stepper`."""
        ...

    def usable(self, step: PlannedStep) -> list[TrainingRow]:
        """The rows of all ranks in `step`, without those whose states must not be trained on."""
        ...

    def quarantined(self) -> int:
        """How many rows were left out for their states, as far as is known."""
        ...


@dataclass(frozen=True)
class Stored:
    """All states are on disk, and stage `hidden` has left out what must not be trained on."""

    found: RowSet
    settings: TrainSettings

    def samples(self) -> Iterator[Sample]:
        """What the rows hold: in the order of the files, or in that of the first epoch where it goes by shards."""
        by_shard = self.settings.order == "shards"
        order = row_order(self.found, self.settings, 0) if by_shard else range(len(self.found.rows))
        return (sample(self.found.rows[index]) for index in order)

    def load(self, stepper: Stepper, steps: Sequence[PlannedStep]) -> Iterator[Any]:
        """The batches of this rank in `steps`."""
        return stepper.load([[self.found.rows[index] for index in batch] for step in steps for batch in own_batches(step)])

    def usable(self, step: PlannedStep) -> list[TrainingRow]:
        """All rows of `step`."""
        return [self.found.rows[index] for batch in step.batches for index in batch]

    def quarantined(self) -> int:
        """None."""
        return 0


def own_batches(step: PlannedStep) -> list[tuple[int, ...]]:
    """The rows of each batch of this rank in `step`, which may have none."""
    return [batch for batch in ranks.mine(step.batches) if batch]


def sample(row: TrainingRow) -> Sample:
    """What the slots of `row` see, and the target's state that they lead to."""
    return Sample(decoded(row.aux[row.slots]), row.tokens[row.slots + 1].long(), decoded(row.final))
