"""The forward passes of one shard.

Shapes: T tokens of a row, F positions of it with a teacher, H hidden size.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

from scripts.lib.engines.protocol import RowStates, StateRequest, TargetEngine
from scripts.lib.ground.errors import StageError
from scripts.lib.states.rows import TokenRow

LEAD_TOKENS = 16  # rows with so many first tokens in common are put together: most begin with the same system text
LEAD_ROWS = 8  # fewer rows of one beginning go with the rest, where batches are fuller
Known = Callable[[Sequence[TokenRow]], Sequence[RowStates] | None]


def unknown(_: Sequence[TokenRow]) -> None:
    """No batch is known."""


def capture(
    engine: TargetEngine, rows: Sequence[TokenRow], boundaries: Sequence[int], batch_tokens: int, known: Known = unknown
) -> list[RowStates]:
    """States of `rows`, in their order, as a shard holds them; the engine is not asked for batches that are `known`.

    Raises StageError when the engine gives other than one state a token.
    """
    states: dict[int, RowStates] = {}
    for batch in batches([row.input_ids for row in rows], batch_tokens):
        members = [rows[index] for index in batch]
        made = known(members)
        if made is None:
            made = engine.states([StateRequest(row.input_ids, row.final_index) for row in members], boundaries)
        for index, state in zip(batch, made, strict=True):
            states[index] = stored(rows[index], state)
    return [states[index] for index in range(len(rows))]


def batches(rows: Sequence[Sequence[int]], batch_tokens: int) -> Iterator[list[int]]:
    """Indexes of `rows` of tokens: at most `batch_tokens` padded tokens in a batch, or one longer row.

    Neighbours are of like length, and of like beginning where many rows share one: an engine computes that once a batch.
    """
    leads = [tuple(row[:LEAD_TOKENS]) for row in rows]
    common = {lead for lead, count in Counter(leads).items() if count >= LEAD_ROWS}
    order = sorted(range(len(rows)), key=lambda index: (leads[index] if leads[index] in common else (), len(rows[index]), index))
    batch: list[int] = []
    longest = 0
    for index in order:
        longest = max(longest, len(rows[index]))
        if batch and longest * (len(batch) + 1) > batch_tokens:
            yield batch
            batch, longest = [], len(rows[index])
        batch.append(index)
    yield batch


def stored(row: TokenRow, state: RowStates) -> RowStates:
    """`state` of `row` as a shard holds it. Raises StageError when it has not one aux state a token and one final state a teacher."""
    got = (state.aux.shape[0], state.aux.shape[1], state.final.shape[0], state.argmax.shape[0])
    wanted = (len(row.input_ids), 3, len(row.final_index), len(row.final_index))
    if got != wanted:
        raise StageError(
            f"row {row.id}: the engine gave (tokens, layers, final states, argmax) = {got}, wanted {wanted}; "
            "a prefix cache drops states: switch it off in the engine"
        )
    return RowStates(state.aux.to("cpu", torch.bfloat16), state.final.to("cpu", torch.bfloat16), state.argmax.cpu())
