"""Checks of what came out of a forward pass, before it is written.

Shapes: T tokens of a row, F positions of it with a teacher, H hidden size, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from scripts.lib.engines.protocol import RowStates, TargetEngine
from scripts.lib.ground.errors import StageError
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


def defect(state: RowStates) -> str | None:
    """Why the states of a row must not be trained on, or None."""
    if not (torch.isfinite(state.aux).all() and torch.isfinite(state.final).all()):
        return "non_finite"
    return "zero_state" if bool((state.aux == 0).all(-1).any()) else None


def check_sample(engine: TargetEngine, row: TokenRow, state: RowStates, boundaries: Sequence[int], dtype: str) -> None:
    """Compare `state` of `row`, as its batch gave it, with the engine's plain pass over the row alone.

    Batches, padding, neighbours and taps must decide nothing beyond the noise of `dtype`. Raises StageError with the first token,
    layer or position that differs by more.
    """
    aux, final = (states.cpu() for states in engine.reference(row.input_ids[:CHECKED_TOKENS], boundaries))
    for place, boundary in enumerate(boundaries):
        compare(f"row {row.id}, state at boundary {boundary}", state.aux[: len(aux), place], aux[:, place], range(len(aux)), dtype)
    inside = [place for place in row.final_index if place < len(aux)]
    if not inside:
        return
    alone = final[inside]
    compare(f"row {row.id}, final state", state.final[: len(inside)], alone, inside, dtype)
    for start in range(0, len(inside), LOGIT_ROWS):
        logits = engine.logits(alone[start : start + LOGIT_ROWS]).float().cpu()
        check_argmax(row, inside[start : start + LOGIT_ROWS], logits, state.argmax[start : start + len(logits)], dtype)


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


def check_argmax(row: TokenRow, places: Sequence[int], logits: Tensor, argmax: Tensor, dtype: str) -> None:
    """Raise StageError when `argmax` [n] from the batch is not the best of `logits` [n, V] at `places`, nor nearly tied with it."""
    for place in (logits.argmax(-1) != argmax).nonzero().flatten().tolist():
        best = logits[place].argmax()
        gap = float(logits[place, best] - logits[place, argmax[place]])
        if not gap <= NOISE[dtype] * float(logits[place].abs().max()):
            raise StageError(
                f"row {row.id}, position {places[place]}: best is {int(argmax[place])} in the batch and {int(best)} alone, "
                f"with a gap of {gap:.3g}, more than {dtype} explains; {REPORT}"
            )


def unlike_greedy(engine: TargetEngine, row: TokenRow, state: RowStates) -> int:
    """At how many teachers of `row` the next token is neither the target's choice nor nearly tied with it.

    For rows that the target wrote greedily. A tie is judged by the noise of bfloat16, in which the final state is kept.
    """
    following = torch.tensor([row.input_ids[place + 1] for place in row.final_index])
    different = (state.argmax != following).nonzero().flatten()
    count = 0
    for places in different.split(LOGIT_ROWS):
        logits = engine.logits(state.final[places]).float().cpu()
        gap = logits.amax(-1) - logits.gather(1, following[places, None]).flatten()
        count += int((gap > NOISE["bfloat16"] * logits.abs().amax(-1)).sum())
    return count
