"""speculators' own EAGLE-3 model, loss and optimizer on our rows, set as its trainer sets them.

Its package (speculators 0.9.0, Apache-2.0, with hs-connectors, openai and loguru) must be importable. What its trainer does in a step is
done here with its own parts: rows packed into one sequence of fixed length, autocast to bf16, KL divergence, clipping at 1, AdamW.
It keeps the draft head as it was in the target, so that it has less to compute than trainers that train it. Batches lie on the device
before the clock starts.
"""

import gc
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.losses import LossConfig, resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor

from benchmarks.train_rows import Shape
from scripts.lib.states.encoded import decoded
from scripts.lib.training.batches import TrainingRow

WARMUP, CLIP, RATE = 6, 1.0, 1e-4
Batch = tuple[dict[str, Tensor], int]


@dataclass(frozen=True)
class Trial:
    """Where it trains, how many steps it drafts, how many optimizer steps are timed, and its `kind` of loss, `fused` or `eager`."""

    device: str
    drafted: int
    timed: int
    kind: str

    @cached_property
    def loss(self) -> LossConfig:
        """Its KL divergence. torch 2.11 cannot compile the fused one's kernels within a graph: that ends before them."""
        whole = resolve_loss_config("kl_div", self.kind)
        return whole if self.kind == "eager" else {name: (torch.compiler.disable(loss), weight) for name, (loss, weight) in whole.items()}


def speculators(shape: Shape, rows: Sequence[TrainingRow], trial: Trial, length: int) -> dict[str, Any]:
    """Trained tokens a second and peak memory (10^9 bytes) of optimizer steps on sequences of `length` tokens."""
    device, timed = trial.device, trial.timed
    model = new_model(shape, trial.drafted, device)
    optimizer = torch.optim.AdamW((weight for weight in model.parameters() if weight.requires_grad), lr=RATE)
    batches = packed(rows, length, device)
    runs = [batches[number % len(batches)] for number in range(WARMUP + timed)]
    for tensors, _ in runs[:WARMUP]:
        train_step(model, optimizer, tensors, trial)
    synchronise(device)
    start = time.perf_counter()
    for tensors, _ in runs[WARMUP:]:
        train_step(model, optimizer, tensors, trial)
    peak = synchronise(device)
    seconds = time.perf_counter() - start
    del model, optimizer, batches
    gc.collect()
    return {
        "trained_tokens_per_second": round(sum(count for _, count in runs[WARMUP:]) / seconds, 1),
        "peak_gb": round(peak, 2),
        "seconds_per_step": round(seconds / timed, 4),
    }


def new_model(shape: Shape, steps: int, device: str) -> Eagle3DraftModel:
    """Its drafter with random weights; embedding and heads are frozen, as in its trainer."""
    layer = shape.target()
    layer.num_hidden_layers = 1
    layer._attn_implementation = "simple_flex_attention" if device == "cuda" else "eager"
    boundaries = [2, shape.layers // 2, shape.layers - 3]
    method = GreedyTokenProposalConfig(speculative_tokens=steps)
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=shape.draft_vocabulary,
        norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=boundaries,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[method], default_proposal_method="greedy", verifier=verifier
        ),
    )
    model = Eagle3DraftModel(config)
    with torch.no_grad():
        for weight in (model.embed_tokens.weight, model.lm_head.weight, model.verifier_lm_head.weight):
            weight.normal_(std=0.02)
    return model.to(device).train()


def train_step(model: Eagle3DraftModel, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], trial: Trial) -> None:
    """One optimizer step of its trainer."""
    with torch.autocast(trial.device, torch.bfloat16):
        _, loss, _ = model(**tensors, ttt_steps=trial.drafted, ttt_step_loss_decay=1.0, loss_config=trial.loss)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()


def packed(rows: Sequence[TrainingRow], length: int, device: str) -> list[Batch]:
    """Rows end to end in sequences of `length` tokens, each with the number of slots that our own rows would train.

    As full as its own sampler makes them: the longest rows first, each to the first sequence with room for it; then shuffled. A row that is
    longer than a whole sequence is left out.
    """
    groups: list[list[TrainingRow]] = []
    for row in sorted(rows, key=lambda row: -len(row.aux)):
        if len(row.aux) <= length:
            room = (group for group in groups if sum(len(other.aux) for other in group) + len(row.aux) <= length)
            found = next(room, None)
            if found is None:
                groups.append(found := [])
            found.append(row)
    random.Random(0).shuffle(groups)
    return [(joined(group, length, device), sum(len(row.slots) for row in group)) for group in groups]


def joined(rows: Sequence[TrainingRow], length: int, device: str) -> dict[str, Tensor]:
    """`rows` under its names, [1, `length`, ...]: slot t holds the states of token t, token t + 1 and the teacher of slot t."""
    size = rows[0].aux.shape[2]
    made = {name: torch.zeros(1, length, dtype=torch.int64) for name in ("input_ids", "position_ids")}
    mask, documents = torch.zeros(1, length, dtype=torch.bool), torch.full((1, length), -1)
    hidden, last = (torch.zeros(1, length, width, dtype=torch.bfloat16) for width in (3 * size, size))
    start = 0
    for number, row in enumerate(rows):
        part = slice(start, start + len(row.aux))
        made["input_ids"][0, part] = row.tokens[1:]
        made["position_ids"][0, part] = torch.arange(1, len(row.aux) + 1)
        documents[0, part] = number
        mask[0, start + row.slots] = True
        hidden[0, part] = decoded(row.aux).flatten(1)
        last[0, start + row.slots] = decoded(row.final)
        start = part.stop
    tensors = made | {"loss_mask": mask, "document_ids": documents, "hidden_states": hidden, "verifier_last_hidden_states": last}
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def synchronise(device: str) -> float:
    """Wait for the device; its peak memory so far in 10^9 bytes, counted anew from here. On a CPU that of the process."""
    if device != "cuda":
        return os.sysconf("SC_PAGE_SIZE") * int(open("/proc/self/statm").read().split()[1]) / 1e9
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.reset_peak_memory_stats()
    return peak
