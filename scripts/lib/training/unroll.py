"""Training-time test: the drafter drafts K steps ahead from every trained slot at once, as it will when serving.

The projections see [embedding; state]. The embedding's half of slot t at step s is that of slot t + s at step 0, so it is
computed once.
Shapes: N positions of a batch, Q slots (queries exist only here), M slots still drafting at a step, H hidden size,
A attention heads, G key/value heads, E head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from scripts.lib.training.batches import Batch
from scripts.lib.training.products import Norm, Operands
from scripts.lib.training.rotation import Rotation
from scripts.lib.training.slot_attention import attend, pieces


@dataclass(frozen=True)
class Step:
    """States of one step: `states` [M, H] before `norm`, of the slots `active` i64[M] (indices into the Q slots)."""

    states: Tensor
    active: Tensor


@dataclass(frozen=True)
class Heads:
    """Queries [Q, A E] of slots, keys and values [N, G E] of positions, not rotated: what embeddings alone give."""

    queries: Tensor
    keys: Tensor
    values: Tensor


@dataclass
class Memory:
    """What slots attend to: keys and values [N, G, E] of step 0, and [M, G, E] of each own step since, for the active slots."""

    keys: Tensor
    values: Tensor
    own_keys: list[Tensor]
    own_values: list[Tensor]

    def narrow(self, kept: Tensor) -> None:
        """Forget the own steps of slots that stop: `kept` indexes the slots active so far."""
        self.own_keys = [keys.index_select(0, kept) for keys in self.own_keys]
        self.own_values = [values.index_select(0, kept) for values in self.own_values]


def unroll(operands: Operands, embedding: Tensor, batch: Batch, steps: int) -> list[Step]:
    """Draft states of `steps` steps from every slot of `batch`.

    `embedding` [V, H] is the target's token embedding. Keys and values of step 0 exist for all N positions, once;
    everything else only for slots. Step s of slot t stands at position t + s, takes its own state of step s - 1 and
    the row's token t + 1 + s, and sees step 0 of positions up to t and its own steps 1 to s.
    Steps with no slot left are not in the list.
    """
    drafter, slots = operands.drafter, batch.slots
    attention = drafter.midlayer.self_attn
    rotation = Rotation.of(attention.rotary, batch.positions)
    fused = fuse(operands, batch.aux)
    embedded = from_embeddings(operands, functional.embedding(batch.next_tokens, embedding), slots)
    normed = operands.norm(fused, drafter.midlayer.hidden_norm)
    keys, values = (
        operands.product(normed, projection.weight, states_half(operands)) for projection in (attention.k_proj, attention.v_proj)
    )
    memory = Memory(rotation.turned(embedded.keys + keys), rotation.heads(embedded.values + values), [], [])
    active = torch.arange(len(slots), device=slots.device)
    states, normed = fused.index_select(0, slots), normed.index_select(0, slots)
    unrolled: list[Step] = []
    for step in range(steps):
        if step:
            kept = (batch.remaining[active] > step).nonzero().flatten()
            if not len(kept):
                break
            active, states = active[kept], fed_back(operands, states).index_select(0, kept)
            normed = operands.norm(states, drafter.midlayer.hidden_norm)
            memory.narrow(kept)
            remember(operands, memory, embedded, (normed, slots[active + step]), rotation)
        queries = operands.product(normed, attention.q_proj.weight, states_half(operands))
        queries = rotation.turned(embedded.queries.index_select(0, active + step) + queries, slots[active + step])
        attended = attend(pieces(batch, active), queries, (memory.keys, memory.values), (memory.own_keys, memory.own_values))
        states = finish(operands, attended, states)
        unrolled.append(Step(states, active))
    return unrolled


def states_half(operands: Operands) -> slice:
    """The columns of the projections that see states; those before them see embeddings."""
    return slice(operands.drafter.config.hidden_size, None)


def fuse(operands: Operands, aux: Tensor) -> Tensor:
    """Features [N, H] of the target's states `aux` [N, 3, H]."""
    drafter = operands.drafter
    if drafter.config.fc_norm:
        weights = [norm.weight for norm in drafter.fc_norm]
        normed = [Norm.apply(state, weight, drafter.config.rms_norm_eps) for state, weight in zip(aux.unbind(1), weights, strict=True)]
        aux = torch.stack(normed, 1)
    return operands.product(aux.flatten(1), drafter.fc.weight)


def from_embeddings(operands: Operands, embeds: Tensor, slots: Tensor) -> Heads:
    """The embedding's half of all heads, of `embeds` [N, H]."""
    attention, norm = operands.drafter.midlayer.self_attn, operands.drafter.midlayer.input_layernorm
    half = slice(operands.drafter.config.hidden_size)
    embeds = functional.rms_norm(embeds.float(), embeds.shape[-1:], None, norm.eps)
    queries = operands.constant_product(embeds[slots], norm.weight, attention.q_proj.weight, half)
    keys, values = (
        operands.constant_product(embeds, norm.weight, projection.weight, half) for projection in (attention.k_proj, attention.v_proj)
    )
    return Heads(queries, keys, values)


def remember(operands: Operands, memory: Memory, embedded: Heads, states: tuple[Tensor, Tensor], rotation: Rotation) -> None:
    """Add the keys and values of a later step to `memory`: of normed states [M, H] at the positions i64[M]."""
    (normed, places), attention = states, operands.drafter.midlayer.self_attn
    keys = operands.product(normed, attention.k_proj.weight, states_half(operands))
    values = operands.product(normed, attention.v_proj.weight, states_half(operands))
    memory.own_keys.append(rotation.turned(embedded.keys.index_select(0, places) + keys, places))
    memory.own_values.append(rotation.heads(embedded.values.index_select(0, places) + values))


def finish(operands: Operands, attended: Tensor, hidden: Tensor) -> Tensor:
    """The layer's output [M, H] of `attended` [M, A, E] and the residual `hidden` [M, H]."""
    layer = operands.drafter.midlayer
    hidden = hidden + operands.product(attended.flatten(1), layer.self_attn.o_proj.weight)
    normed = operands.norm(hidden, layer.post_attention_layernorm)
    gate, up = (operands.product(normed, projection.weight) for projection in (layer.mlp.gate_proj, layer.mlp.up_proj))
    return hidden + operands.product(functional.silu(gate) * up, layer.mlp.down_proj.weight)


def fed_back(operands: Operands, states: Tensor) -> Tensor:
    """What the next draft step takes as features [M, H] after draft `states` [M, H] before `norm`."""
    drafter = operands.drafter
    return operands.norm(states, drafter.norm) if drafter.config.norm_output else states
