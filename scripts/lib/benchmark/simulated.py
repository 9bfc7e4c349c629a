"""Accept length on a task's own prompts, walked over the target's answers instead of served.

Every position of an answer drafts at once, as in training, and each answer is then walked cycle by cycle. In exact arithmetic
that is what chain decoding accepts at temperature 0, so a server that differs serves something else than what was trained.

Shapes: B answers of one forward pass, T tokens of the longest, N positions and Q slots of all of them end to end, H hidden size.
"""

import logging
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from scripts.lib.eagle3.export import load_drafter
from scripts.lib.eagle3.model import Drafter
from scripts.lib.engines.decoder import final_states, tapped
from scripts.lib.engines.transformers_engine import load_target
from scripts.lib.training.batches import Batch
from scripts.lib.training.evaluation import accept_length, accepted_drafts, span_starts, walks
from scripts.lib.training.products import Operands
from scripts.lib.training.slots import trained_slots
from scripts.lib.training.unroll import unroll

log = logging.getLogger(__name__)
Row = tuple[Sequence[int], Sequence[int]]  # ids of a prompt and of the target's answer to it

PASS_TOKENS = 16384  # of one forward pass, padding included
HEAD_ROWS = 2048  # of one product with the drafter's head


def simulated_accept_length(target: Path, drafter: Path, rows: Sequence[Row], draft_steps: int, device: str) -> float | None:
    """Tokens that a verify step would write on average over `rows`, greedy answers of the target, with chains of `draft_steps`.

    Computed in bfloat16 on a GPU, as it serves, and in float32 on a CPU. None when no answer has two tokens, or when the target
    does not fit beside what the GPU holds already. Raises StageError for a folder that cannot be read.
    """
    answered = [(list(prompt), list(answer)) for prompt, answer in rows if len(answer) > 1]
    if not answered or not room_for(target, device):
        return None
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    model, network = load_target(target, dtype, device), load_drafter(drafter, dtype, device)
    walked = torch.zeros(2, dtype=torch.int64, device=model.device)
    for batch in passes(answered):
        walked += walk(model, network, batch, draft_steps)
    cycles, accepted = walked.tolist()
    return accept_length(cycles, accepted)


def room_for(target: Path, device: str) -> bool:
    """Whether the weights of `target` fit into what is free on `device`; always on a CPU."""
    if torch.device(device).type != "cuda":
        return True
    size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    free, _ = torch.cuda.mem_get_info(torch.device(device))
    if size > free:
        log.warning("no simulated accept length: the target's %s bytes do not fit into the %s free ones of %s", size, free, device)
    return size <= free


def passes(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """`rows` by length, as many at a time as `PASS_TOKENS` allow."""
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row[0]) + len(row[1])):
        if batch and (len(batch) + 1) * (len(row[0]) + len(row[1])) > PASS_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


@torch.inference_mode()
def walk(model: PreTrainedModel, drafter: Drafter, rows: Sequence[Row], draft_steps: int) -> Tensor:
    """Verify cycles and accepted drafts of all `rows` together, i64[2].

    The tokens behind the end of an answer were never written, so the last cycle accepts no more drafts than were.
    """
    batch, goals = positions(model, rows, drafter.config.boundaries)
    hits = torch.zeros(draft_steps, len(goals), dtype=torch.bool, device=goals.device)
    embedding = cast(Tensor, model.get_input_embeddings().weight)
    for number, step in enumerate(unroll(Operands(drafter, drafter.fc.weight.dtype), embedding, batch, draft_steps)):
        states = step.states.to(drafter.fc.weight.dtype)  # float32 behind norm_output
        drafts = torch.cat([drafter.logits(part).argmax(-1) for part in states.split(HEAD_ROWS)])
        hits[number, step.active] = drafter.target_ids[drafts] == goals[step.active + number]
    accepted = accepted_drafts(hits).minimum(batch.remaining - 1)
    return walks(accepted, batch.remaining)[span_starts(batch.remaining)].sum(0)


def positions(model: PreTrainedModel, rows: Sequence[Row], boundaries: Sequence[int]) -> tuple[Batch, Tensor]:
    """What a drafter sees of `rows`, and the token i64[Q] that each slot drafts first.

    Rows are padded on the right, where causal attention keeps padding out of every real token.
    """
    texts = [torch.tensor([*prompt, *answer]) for prompt, answer in rows]
    found = [trained_slots([(len(prompt), len(prompt) + len(answer))]) for prompt, answer in rows]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(model.device)
    with tapped(model, boundaries) as taps:
        final_states(model, ids, None)
    aux = torch.stack([taps[boundary] for boundary in boundaries], 2)  # [B, T, 3, H]
    lengths = [len(text) - 2 for text in texts]  # the last slot drafts the last token
    row_starts, slot_starts = ([0, *accumulate(sizes)] for sizes in (lengths, [len(slots) for slots, _ in found]))
    parts = list(zip(texts, found, row_starts, strict=False))
    batch = Batch(
        ids=tuple(map(str, range(len(rows)))),
        aux=torch.cat([states[:length] for states, length in zip(aux, lengths, strict=True)]),
        next_tokens=torch.cat([text[1:-1] for text in texts]).to(ids.device),
        positions=torch.cat([torch.arange(length) for length in lengths]).to(ids.device),
        slots=torch.cat([slots + start for _, (slots, _), start in parts]).to(ids.device),
        remaining=torch.cat([remaining for _, (_, remaining), _ in parts]).to(ids.device),
        row_starts=tuple(row_starts),
        slot_starts=tuple(slot_starts),
        final=aux.new_empty(0),  # nobody teaches here
        argmax=ids.new_empty(0),
    )
    return batch, torch.cat([text[slots + 2] for text, (slots, _), _ in parts]).to(ids.device)
