"""The forward passes of one shard.

Shapes: T tokens of a row, F positions of it with a teacher, H hidden size.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from scripts.lib.engines.protocol import RowStates, StateRequest, TargetEngine
from scripts.lib.ground.errors import StageError
from scripts.lib.states.checks import sampled
from scripts.lib.states.landing import Landed, Landing
from scripts.lib.states.rounded import Rounded
from scripts.lib.states.rows import TokenRow

LEAD_TOKENS = 16  # rows with so many first tokens in common are put together: most begin with the same system text
LEAD_ROWS = 8  # fewer rows of one beginning go with the rest, where batches are fuller
Found = TypeVar("Found")
Known = Callable[[Sequence[TokenRow]], Sequence[RowStates] | None]


def unknown(_: Sequence[TokenRow]) -> None:
    """No batch is known."""


@dataclass(frozen=True)
class Batching:
    """At most `tokens` padded tokens of rows in a batch, or one longer row. `leads`: rows with the same first tokens are put together.

    `rounding` is the device that rounds the states of a batch as a shard in fp8 holds them, None where they come as they are.
    """

    tokens: int
    leads: bool = True
    rounding: torch.device | None = None


@dataclass(frozen=True)
class Captured:
    """The `rows` of a shard and batches of them as they land, each with the numbers of its rows.

    Row `whole` is the only one whose aux states are all there if a device rounded them; None where none did.
    """

    rows: Sequence[TokenRow]
    batches: Sequence[tuple[Sequence[int], Landed]]
    whole: int | None

    def wait(self) -> list[RowStates]:
        """The states of all rows, in their order."""
        return self._by_row(Landed.wait)

    def rounded(self) -> list[Rounded]:
        """What a shard holds of all rows, if a device rounded them; to be asked when they are there."""
        return [] if self.whole is None else self._by_row(lambda landed: landed.rounded)

    def defects(self) -> list[str | None]:
        """Why the states of each row must not be trained on, or None; to be asked when all are there."""
        return self._by_row(Landed.defects)

    def _by_row(self, of: Callable[[Landed], Sequence[Found]]) -> list[Found]:
        """What `of` gives of the rows of each batch, in the order of all rows."""
        found: dict[int, Found] = {}
        for numbers, landed in self.batches:
            found |= zip(numbers, of(landed), strict=True)
        return [found[number] for number in range(len(self.rows))]


def capture(
    engine: TargetEngine, rows: Sequence[TokenRow], boundaries: Sequence[int], batching: Batching, known: Known = unknown
) -> Captured:
    """States of `rows`; the engine is not asked for batches that are `known`. A GPU may still work on the last batches.

    Raises StageError when the engine gives other than one state a token.
    """

    def made(members: Sequence[TokenRow]) -> Sequence[RowStates]:
        states = known(members)
        if states is None:
            states = engine.states([StateRequest(row.input_ids, row.final_index) for row in members], boundaries)
        for row, state in zip(members, states, strict=True):
            check_shape(row, state)
        return states

    landing, whole = Landing(batching.rounding), sampled(rows) if batching.rounding else None
    landed: list[tuple[Sequence[int], Landed]] = []
    for batch in batches([row.input_ids for row in rows], batching):
        own = batch.index(whole) if whole in batch else None
        with engine.lane():
            landed.append((batch, landing.land(made([rows[index] for index in batch]), own)))
    return Captured(rows, landed, whole)


def batches(rows: Sequence[Sequence[int]], batching: Batching) -> Iterator[list[int]]:
    """Indexes of `rows` of tokens, cut as `batching` says.

    Neighbours are of like length and, with `leads`, of like beginning where many rows share one: an engine that computes a beginning once
    a batch gains by that, and others lose, as lengths differ more.
    """
    leads = [tuple(row[:LEAD_TOKENS]) if batching.leads else () for row in rows]
    common = {lead for lead, count in Counter(leads).items() if count >= LEAD_ROWS}
    order = sorted(range(len(rows)), key=lambda index: (leads[index] if leads[index] in common else (), len(rows[index]), index))
    batch: list[int] = []
    longest = 0
    for index in order:
        longest = max(longest, len(rows[index]))
        if batch and longest * (len(batch) + 1) > batching.tokens:
            yield batch
            batch, longest = [], len(rows[index])
        batch.append(index)
    yield batch


def check_shape(row: TokenRow, state: RowStates) -> None:
    """Raise StageError when `state` of `row` has not one aux state a token and one final state a teacher."""
    got = (state.aux.shape[0], state.aux.shape[1], state.final.shape[0], state.argmax.shape[0])
    wanted = (len(row.input_ids), 3, len(row.final_index), len(row.final_index))
    if got != wanted:
        raise StageError(
            f"row {row.id}: the engine gave (tokens, layers, final states, argmax) = {got}, wanted {wanted}; "
            "a prefix cache drops states: switch it off in the engine"
        )
