"""Training-time test on packed batches: every step has the same shapes, and what steps share is computed once.

The projections see [embedding; state]. The embedding's half of slot t at step s is that of slot t + s at step 0, so it
is computed once for the batch and shifted. Slots whose span ends before a step compute on, and count nothing.
Shapes: N positions and Q slots of a batch, H hidden size, A attention heads, G key/value heads, E head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from scripts.lib.eagle3.model import Drafter
from scripts.lib.training.packed import PackedBatch
from scripts.lib.training.row_attention import FirstKeys, block_first_keys, dense_first_keys, join

Norm = tuple[Tensor, float]  # weight and epsilon
Turn = tuple[Tensor, Tensor]  # cosine and sine f32[T, E]


@dataclass(frozen=True)
class Kernels:
    """The pieces of a step, plain or compiled."""

    project: Callable[..., Any]
    join: Callable[..., Any]
    finish: Callable[..., Any]
    norm: Callable[..., Any]
    first_keys: Callable[[PackedBatch], FirstKeys]
    run: Callable[..., Any]  # runs a draft step: keeps what it computes, or computes it again in the backward pass


def plain_kernels(recompute: bool = False) -> Kernels:
    """Torch operations one by one, for any device."""
    return Kernels(project, join, finish, normed, dense_first_keys, again if recompute else once)


def compiled_kernels(recompute: bool = False) -> Kernels:
    """Each piece compiled into few kernels, FlexAttention for the first keys; for CUDA. Every capacity compiles anew."""

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, dynamic=False)

    attention = compiled(flex_attention)
    run = again if recompute else once
    return Kernels(
        compiled(project), compiled(join), compiled(finish), compiled(normed), lambda batch: block_first_keys(batch, attention), run
    )


def once(step: Callable[..., Any], *arguments: Any) -> Any:
    """`step(*arguments)`."""
    return step(*arguments)


def again(step: Callable[..., Any], *arguments: Any) -> Any:
    """`step(*arguments)`, of which only the arguments are kept for the backward pass."""
    return checkpoint(step, *arguments, use_reentrant=False, preserve_rng_state=False)


def normed(states: Tensor, norm: Norm) -> Tensor:
    """Root-mean-square norm of `states` [T, H]."""
    weight, eps = norm
    return functional.rms_norm(states, states.shape[-1:], weight, eps)


def project(states: Tensor, norm: Norm, embedded: Tensor, heads: tuple[Tensor, int], turn: Turn) -> tuple[Tensor, Tensor]:
    """Heads of `states` [T, H]: the first ones rotated [T, turned, E], and the others [T, rest, E].

    `heads` are the states' half of the projections [heads * E, H] and how many heads turn; `embedded` [T, heads * E] is
    what the embedding's half gave.
    """
    weight, turned = heads
    cos, sin = turn
    made = torch.addmm(embedded, normed(states, norm), weight.t()).unflatten(-1, (-1, cos.shape[-1]))
    wide = made[:, :turned].float()
    first, second = wide.chunk(2, -1)
    rotated = wide * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
    return rotated.to(states.dtype), made[:, turned:].clone()


def finish(attended: Tensor, hidden: Tensor, norm: Norm, weights: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The layer's output [Q, H] from `attended` [Q, A, E] and the residual `hidden` [Q, H].

    `weights` are those of the attention's output [H, A E], of gate and up [2I, H], and of down [H, I].
    """
    out, gate_up, down = weights
    hidden = torch.addmm(hidden, attended.flatten(1), out.t())
    gate, up = (normed(hidden, norm) @ gate_up.t()).chunk(2, -1)
    return torch.addmm(hidden, functional.silu(gate) * up, down.t())


@dataclass(frozen=True)
class Weights:
    """The drafter's weights as a step wants them: projections joined, split into their embedding's and their state's half."""

    drafter: Drafter
    from_embeds: Tensor  # [(A + 2G) E, H]
    from_states: Tensor  # [(A + 2G) E, H]
    gate_up: Tensor  # [2I, H]

    @classmethod
    def of(cls, drafter: Drafter) -> "Weights":
        """Join the weights of `drafter`; gradients flow back to them."""
        attention, mlp = drafter.midlayer.self_attn, drafter.midlayer.mlp
        joined = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        size = drafter.config.hidden_size
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        return cls(drafter, joined[:, :size].contiguous(), joined[:, size:].contiguous(), gate_up)


def unroll_packed(drafter: Drafter, embedding: Tensor, batch: PackedBatch, steps: int, kernels: Kernels) -> list[Tensor]:
    """For each of `steps` steps the draft states [Q, H] behind the last norm, what the head reads.

    `embedding` [V, H] is the target's. Rows of slots that are not trained at a step hold finite numbers of no meaning.
    """
    config, layer, weights = drafter.config, drafter.midlayer, Weights.of(drafter)
    width, slots = config.num_attention_heads * config.head_dim, batch.slots
    fused = drafter.fuse(batch.aux)
    embedded, embedded_keys = from_embeddings(drafter, weights, embedding, batch, kernels)
    embedded = functional.pad(embedded, (0, 0, 0, steps - 1))
    projection = (weights.from_states[width:], config.num_key_value_heads)
    norm, turn = (layer.hidden_norm.weight, config.rms_norm_eps), rotations(drafter, batch.positions)
    first = (kernels.first_keys(batch), *kernels.project(fused, norm, embedded_keys, projection, turn))
    # index_select, as the gradient of plain indexing sorts on CUDA.
    states = fused.index_select(0, slots)
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    outputs: list[Tensor] = []
    for step in range(steps):
        shifted, turn = embedded[step : step + len(slots)], rotations(drafter, batch.positions[slots] + step)
        own = (own_keys[:], own_values[:]) if step else None
        states, output, added = kernels.run(draft_step, weights, kernels, first, (states, shifted, turn), own)
        if added:
            own_keys.append(added[0])
            own_values.append(added[1])
        outputs.append(output)
        states = output if config.norm_output else states
    return outputs


def draft_step(
    weights: Weights,
    kernels: Kernels,
    first: tuple[FirstKeys, Tensor, Tensor],
    slots: tuple[Tensor, Tensor, Turn],
    own: tuple[list[Tensor], list[Tensor]] | None,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Draft states [Q, H] of one step before and behind the last norm, and the keys and values [Q, G, E] that it adds.

    `first` attends to the keys and values of step 0; `slots` are states [Q, H], the embedding's half of their heads and their
    rotation; `own` are keys and values of the slots' own steps so far. Step 0 has none (None) and adds none: its keys are the positions'.
    """
    drafter, config, layer = weights.drafter, weights.drafter.config, weights.drafter.midlayer
    (attend, keys, values), (states, embedded, turn) = first, slots
    norms = [(norm.weight, config.rms_norm_eps) for norm in (layer.hidden_norm, layer.post_attention_layernorm, drafter.norm)]
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    if own is None:
        width = heads * config.head_dim
        queries, _ = kernels.project(states, norms[0], embedded[:, :width], (weights.from_states[:width], heads), turn)
        attended, _ = attend(queries, keys, values)
        added = None
    else:
        turned, own_value = kernels.project(states, norms[0], embedded, (weights.from_states, heads + groups), turn)
        queries, own_key = turned.split([heads, groups], 1)
        added = (own_key, own_value)
        attended, lse = attend(queries, keys, values)
        attended = kernels.join(queries, attended, lse, [*own[0], own_key], [*own[1], own_value])
    states = kernels.finish(attended, states, norms[1], (layer.self_attn.o_proj.weight, weights.gate_up, layer.mlp.down_proj.weight))
    return states, kernels.norm(states, norms[2]), added


def from_embeddings(drafter: Drafter, weights: Weights, embedding: Tensor, batch: PackedBatch, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """The embedding's half of all heads at the slots [Q, (A + 2G) E], and of keys and values at all positions [N, 2G E]."""
    config = drafter.config
    width = config.num_attention_heads * config.head_dim
    embeds = functional.embedding(batch.next_tokens, embedding).to(batch.aux.dtype)
    embeds = kernels.norm(embeds, (drafter.midlayer.input_layernorm.weight, config.rms_norm_eps))
    keys = embeds @ weights.from_embeds[width:].t()
    queries = embeds.index_select(0, batch.slots) @ weights.from_embeds[:width].t()
    return torch.cat([queries, keys.index_select(0, batch.slots)], 1), keys


def rotations(drafter: Drafter, positions: Tensor) -> Turn:
    """Cosine and sine f32[T, E] by which rotary embedding turns heads at `positions` [T]."""
    rotary = drafter.midlayer.self_attn.rotary
    rotary.frequencies = rotary.frequencies.to(positions.device)  # kept there: a copy would wait for the device at every step
    angles = positions[:, None].float() * rotary.frequencies
    angles = torch.cat([angles, angles], -1)
    return angles.cos() * rotary.scaling, angles.sin() * rotary.scaling
