"""SpecForge's own EAGLE-3 model, loss and optimizer on our rows, set as its recipes set it.

Its package (specforge 0.2.0, Apache-2.0) must be importable. What its trainer does in a step is done here with its own parts:
target head over the whole vocabulary, shift by one, `OnlineEagle3Model` with FlexAttention, losses weighted 0.8^step,
backward, `BF16Optimizer`. Batches lie on the device before the clock starts, padded to their longest row.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from specforge.algorithms.eagle3 import model as its_module
from specforge.algorithms.eagle3.model import OnlineEagle3Model
from specforge.core.loss import _compute_loss
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from specforge.optimizer import BF16Optimizer
from torch import Tensor, nn
from transformers import LlamaConfig

from benchmarks.train_rows import Shape
from scripts.lib.states.encoded import decoded
from scripts.lib.training.batches import TrainingRow

WARMUP, DECAY = 6, 0.8


def specforge(shape: Shape, rows: Sequence[TrainingRow], steps: int, batch: int, timed: int) -> dict[str, Any]:
    """Trained tokens a second and peak memory (10^9 bytes) of `timed` optimizer steps of `batch` rows each."""
    model, head = new_model(shape, steps)
    optimizer = BF16Optimizer(model, lr=1e-4, total_steps=1000)
    batches = padded_batches(rows, batch)
    for _ in range(WARMUP):
        train_step(model, head, optimizer, next(batches)[0])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start, trained = time.perf_counter(), 0
    for _ in range(timed):
        tensors, count = next(batches)
        train_step(model, head, optimizer, tensors)
        trained += count
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 1e9
    del model, head, optimizer, batches
    gc.collect()
    torch.cuda.empty_cache()
    return {
        "trained_tokens_per_second": round(trained / seconds, 1),
        "peak_gb": round(peak, 2),
        "seconds_per_step": round(seconds / timed, 4),
    }


def new_model(shape: Shape, steps: int) -> tuple[OnlineEagle3Model, nn.Linear]:
    """Its drafter and the target's head in bf16 on the GPU, with random weights."""
    ids = torch.arange(shape.draft_vocabulary) * (shape.vocabulary // shape.draft_vocabulary)
    with torch.device("cuda"):
        head = nn.Linear(shape.hidden, shape.vocabulary, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    return its_model(shape.target(), ids, steps, "cuda", "flex_attention"), head


def dtype_on(device: str) -> torch.dtype:
    """bf16 as its recipes have it; float32 on a CPU, where bf16 is slow."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def its_model(config: LlamaConfig, ids: Tensor, steps: int, device: str, attention: str) -> OnlineEagle3Model:
    """Its drafter for the target of `config` and the draft vocabulary of the target's `ids` i64[D]; embeddings are frozen.

    On a CPU, which runs no Triton, the loss is the plain function that its package tests its kernel against.
    """
    if device == "cpu":
        its_module.LogSoftmaxLoss = SimpleNamespace(apply=_compute_loss)
    config.draft_vocab_size, config.pretraining_tp, config.pad_token_id = len(ids), 1, 0
    with torch.device(device):
        draft = LlamaForCausalLMEagle3(config, attention_backend=attention).to(dtype_on(device))
    draft.d2t.copy_(ids - torch.arange(len(ids)))
    draft.t2d.zero_()[ids.to(device)] = True
    draft.freeze_embedding()
    draft.midlayer.self_attn.rotary_emb.to(device)
    return OnlineEagle3Model(draft, length=steps, attention_backend=attention).to(device).train()


def train_step(model: OnlineEagle3Model, head: nn.Linear, optimizer: BF16Optimizer, tensors: dict[str, Tensor]) -> None:
    """One optimizer step of its trainer."""
    with torch.no_grad():
        target = head(shifted(tensors["target"]))
    losses = model(
        input_ids=shifted(tensors["input_ids"]),
        attention_mask=tensors["attention_mask"],
        loss_mask=tensors["loss_mask"][..., None],
        target=target,
        hidden_states=tensors["hidden_state"],
    )[0]
    sum(DECAY**step * loss for step, loss in enumerate(losses)).backward()
    optimizer.step()


def shifted(tensor: Tensor) -> Tensor:
    """`tensor` [B, T, ...] moved left by one, a zero at the end."""
    return torch.cat([tensor[:, 1:], torch.zeros_like(tensor[:, :1])], 1)


def padded_batches(rows: Sequence[TrainingRow], size: int) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Batches of `size` rows in order on the GPU, over and over, with the number of positions that our own rows would train."""
    starts = range(0, len(rows) - size + 1, size)
    while True:
        for start in starts:
            part = rows[start : start + size]
            yield padded(part, "cuda"), sum(len(row.slots) for row in part)


def padded(rows: Sequence[TrainingRow], device: str) -> dict[str, Tensor]:
    """`rows` side by side on `device`, zeros behind the shorter ones, under its names; the mask holds the same slots as ours."""
    length, size = max(len(row.tokens) for row in rows), rows[0].aux.shape[2]
    shape = (len(rows), length)
    made = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "attention_mask", "loss_mask")}
    hidden = torch.zeros(*shape, 3 * size, dtype=dtype_on(device))
    target = torch.zeros(*shape, size, dtype=dtype_on(device))
    for number, row in enumerate(rows):
        made["input_ids"][number, : len(row.tokens)] = row.tokens
        made["attention_mask"][number, : len(row.tokens)] = 1
        made["loss_mask"][number, row.slots] = 1
        hidden[number, : len(row.aux)] = decoded(row.aux).flatten(1)
        target[number, row.slots + 1] = decoded(row.final).to(target.dtype)
    return {name: tensor.to(device) for name, tensor in (made | {"hidden_state": hidden, "target": target}).items()}
