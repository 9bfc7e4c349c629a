"""Checks of what came out of a forward pass, before it is written.

Shapes: T tokens of a row, F positions of it with a teacher, H hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from scripts.lib.engines.moving import fetched, sent
from scripts.lib.engines.protocol import RowStates, TargetEngine
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import sha256_text
from scripts.lib.states.rows import TokenRow

NOISE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 4e-3}  # of the largest logit: below it two logits are a near tie
UNLIKE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-3}  # 1 - cosine of one state; on average a tenth of it
ERROR = {"float32": 5e-3, "bfloat16": 6e-2, "float16": 1e-2}  # of the state's largest number; states are kept in bfloat16
BETWEEN = " between engines"  # added to a dtype: the reference is another implementation, which rounds elsewhere
for limits in (NOISE, UNLIKE, ERROR):
    limits |= {f"{dtype}{BETWEEN}": 4 * most for dtype, most in limits.items()}
CHECKED_TOKENS = 2048  # of the sampled row: a plain forward pass keeps the states of all layers
LOGIT_ROWS = 512
REPORT = "the engine mixes up rows, tokens, layers or padding; please report it with this log"


@dataclass(frozen=True)
class Peaks:
    """The largest magnitudes of the states of a row: `aux` [T, 3] and `final` [F]."""

    aux: Tensor
    final: Tensor


def largest(states: Tensor) -> Tensor:
    """The largest magnitude [...] of each of `states` [..., H], NaN where a number is."""
    return states.abs().amax(-1)


def defect(peaks: Peaks) -> str | None:
    """Why the states of the row with these `peaks` must not be trained on, or None."""
    if not (torch.isfinite(peaks.aux).all() and torch.isfinite(peaks.final).all()):
        return "non_finite"
    return None if peaks.aux.all() else "zero_state"


def sampled(rows: Sequence[TokenRow]) -> int:
    """The number of the one of `rows` that is checked against the reference: by the hash of its id, whatever its place."""
    return min(range(len(rows)), key=lambda place: sha256_text(rows[place].id))


def check_sample(engine: TargetEngine, row: TokenRow, state: RowStates, boundaries: Sequence[int], dtype: str) -> None:
    """Compare `state` of `row`, as its batch gave it, with the engine's plain pass over the row alone.

    Batches, padding, neighbours and taps must decide nothing beyond the noise of `dtype`. Raises StageError with the first token,
    layer or position that differs by more.
    """
    aux, final = fetched(*engine.reference(row.input_ids[:CHECKED_TOKENS], boundaries))
    for place, boundary in enumerate(boundaries):
        compare(f"row {row.id}, state at boundary {boundary}", state.aux[: len(aux), place], aux[:, place], range(len(aux)), dtype)
    inside = [place for place in row.final_index if place < len(aux)]
    if not inside:
        return
    alone = final[inside]
    compare(f"row {row.id}, final state", state.final[: len(inside)], alone, inside, dtype)
    choices = chosen(engine, alone, state.argmax[: len(inside)])
    check_choices(row, inside, state.argmax[: len(inside)], choices, dtype)


def compare(what: str, states: Tensor, wanted: Tensor, tokens: Sequence[int], dtype: str) -> None:
    """Raise StageError when one of `states` [n, H] of `tokens` is not as `wanted` [n, H] but for the noise of `dtype`."""
    got, wanted = states.float(), wanted.float()
    unlike = 1 - cosine_similarity(got, wanted, dim=-1)
    error = (got - wanted).abs().amax(-1) / wanted.abs().amax(-1)
    worst = int((unlike / UNLIKE[dtype]).maximum(error / ERROR[dtype]).argmax())
    if unlike[worst] > UNLIKE[dtype] or error[worst] > ERROR[dtype] or unlike.mean() > UNLIKE[dtype] / 10:
        raise StageError(
            f"{what}, token {tokens[worst]}: cosine {1 - float(unlike[worst]):.5f} (mean {1 - float(unlike.mean()):.6f}) and largest error "
            f"{float(error[worst]):.2g} against the row alone, {dtype} explains {1 - UNLIKE[dtype]:g} and {ERROR[dtype]:g}; {REPORT}"
        )


@dataclass(frozen=True)
class Choices:
    """What n rows of logits say: the `best` token [n], its `gap` [n] to the token that is asked about, and the `largest` magnitude [n]."""

    best: Tensor
    gap: Tensor
    largest: Tensor


def chosen(engine: TargetEngine, final: Tensor, tokens: Tensor) -> Choices:
    """What the logits of `final` [n, H] say about `tokens` [n], in the host's memory; on a GPU the logits stay where they are."""
    parts = []
    for states, asked in zip(final.split(LOGIT_ROWS), tokens.split(LOGIT_ROWS), strict=True):
        parts.append(choices_of(engine.logits(states).float(), asked))
    return Choices(*fetched(*(torch.cat(own) for own in zip(*parts, strict=True))))


def choices_of(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Best token, gap and largest magnitude, as in `Choices`, of `logits` f32 [n, V] on their device."""
    highest, best = logits.max(-1)
    gap = highest - logits.gather(1, sent(tokens.long(), logits.device)[:, None])[:, 0]
    return best, gap, highest.maximum(-logits.amin(-1))


def check_choices(row: TokenRow, places: Sequence[int], argmax: Tensor, alone: Choices, dtype: str) -> None:
    """Raise StageError when `argmax` [n] of the batch, at `places` of `row`, is neither the best of the row `alone` nor nearly tied."""
    tied = alone.gap <= NOISE[dtype] * alone.largest  # not so for NaN
    for place in ((alone.best != argmax) & ~tied).nonzero().flatten().tolist():
        raise StageError(
            f"row {row.id}, position {places[place]}: best is {int(argmax[place])} in the batch and {int(alone.best[place])} alone, "
            f"with a gap of {float(alone.gap[place]):.3g}, more than {dtype} explains; {REPORT}"
        )


def unlike_greedy(engine: TargetEngine, rows: Sequence[TokenRow], states: Sequence[RowStates]) -> np.ndarray:
    """At how many teachers of each of `rows` the next token is neither the target's choice nor nearly tied with it: counts i64 [R].

    For rows that the target wrote greedily. A tie is judged by the noise of bfloat16, in which the final state is kept.
    """
    counts = np.array([len(row.final_index) for row in rows])
    owners, starts = np.repeat(np.arange(len(rows)), counts), np.cumsum(counts) - counts
    following = np.concatenate([row.ids[np.array(row.final_index, np.int64) + 1] for row in rows])
    different = np.flatnonzero(torch.cat([state.argmax for state in states]).numpy() != following)
    if not len(different):
        return np.zeros(len(rows), np.int64)
    inside = [(owner, different[owners[different] == owner] - starts[owner]) for owner in np.unique(owners[different])]
    final = torch.cat([states[owner].final[torch.from_numpy(places)] for owner, places in inside])
    said = chosen(engine, final, torch.from_numpy(following[different]))
    unlike = (said.gap > NOISE["bfloat16"] * said.largest).numpy()
    return np.bincount(owners[different[unlike]], minlength=len(rows))
