"""Greedy decoding of one prompt, by the target alone and with a chain of drafts.

Prefill ends when the first token is known and, with a drafter, the drafter has read the prompt. All later work is decoding.
Shapes: H hidden size.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from scripts.lib.eagle3.model import Drafter
from scripts.lib.speculation.drafts import DraftChain
from scripts.lib.speculation.limits import Limits
from scripts.lib.speculation.target import CachedTarget


@dataclass(frozen=True)
class PlainRun:
    """The target's own answer; `states` holds the state [H] that each token was chosen from."""

    output_ids: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float
    states: tuple[Tensor, ...]


@dataclass(frozen=True)
class ChainRun:
    """The answer with drafts. `accepted` holds, for each verify step, the tokens that it gave beyond the first.

    That is the accepted drafts when the bonus token was written too. A step that ends the answer inside its drafts
    counts what was written and nothing after it, so 1 + mean(accepted) is always the mean of tokens written a step.
    """

    output_ids: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float
    accepted: tuple[int, ...]


@torch.inference_mode()
def decode_plain(model: PreTrainedModel, prompt_ids: Sequence[int], limits: Limits) -> PlainRun:
    """Write one token a forward pass."""
    start = time.perf_counter()
    target = CachedTarget(model, len(prompt_ids) + limits.max_tokens)
    states = [target.final(prompt_ids)[-1:]]
    output = target.choices(states[-1])
    prefilled = time.perf_counter()
    while not limits.reached(output):
        states.append(target.final(output[-1:]))
        output += target.choices(states[-1])
    end = time.perf_counter()
    return PlainRun(tuple(output), prefilled - start, end - prefilled, tuple(state[0] for state in states))


@torch.inference_mode()
def decode_chain(model: PreTrainedModel, drafter: Drafter, draft_steps: int, prompt_ids: Sequence[int], limits: Limits) -> ChainRun:
    """Verify the newest token and `draft_steps` drafts in one forward pass, and keep what the target would have written itself."""
    start = time.perf_counter()
    target = CachedTarget(model, len(prompt_ids) + limits.max_tokens + draft_steps)
    drafts = DraftChain(drafter, model.get_input_embeddings(), draft_steps)
    boundaries = drafter.config.boundaries
    final, aux = target.final_and_aux(prompt_ids, boundaries)
    output = target.choices(final[-1:])
    drafts.extend(aux, [*prompt_ids[1:], *output])
    prefilled = time.perf_counter()
    accepted = []
    while not limits.reached(output):
        chain = drafts.propose()
        final, aux = target.final_and_aux([output[-1], *chain], boundaries)
        choices = target.choices(final)
        written = limits.cut(choices[: matches(chain, choices) + 1], len(output))
        output += written
        accepted.append(len(written) - 1)
        target.crop(len(prompt_ids) + len(output) - 1)
        drafts.extend(aux[: len(written)], written)
    end = time.perf_counter()
    return ChainRun(tuple(output), prefilled - start, end - prefilled, tuple(accepted))


def matches(chain: Sequence[int], choices: Sequence[int]) -> int:
    """How many drafts of `chain` in a row, from the first, are the target's own `choices`."""
    return next((place for place, (draft, choice) in enumerate(zip(chain, choices, strict=False)) if draft != choice), len(chain))
