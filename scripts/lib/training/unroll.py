"""Training-time test: the drafter drafts K steps ahead from every trained slot at once, as it will when serving.

The first layer's projections see [embedding; state]. The embedding's half of slot t at step s is that of slot t + s at step 0, so
it is computed once. Of step 0, every layer needs keys and values at all positions, so all layers but the last run there; what they
give is also their slots' part of step 0, in which the last layer alone is left to run.
Shapes: N positions of a batch, Q slots, M slots still drafting at a step, T of either, H hidden size, A attention heads, G key/value
heads, E head size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from scripts.lib.eagle3.model import DecoderLayer
from scripts.lib.training.batches import Batch, everywhere
from scripts.lib.training.products import Norm, Operands
from scripts.lib.training.rotation import Rotation
from scripts.lib.training.slot_attention import Piece, attend, pieces

# What embeddings alone give of `queries` [T, A E], `keys` and `values` [T, G E], not rotated; nothing behind the first layer.
Heads = Mapping[str, Tensor]


@dataclass(frozen=True)
class Step:
    """States of one step: `states` [M, H] before `norm`, of the slots `active` i64[M] (indices into the Q slots)."""

    states: Tensor
    active: Tensor


@dataclass(frozen=True)
class Standing:
    """Where T states stand: at the `places` i64[T] of the batch, None for all positions; and the `parts` in which they attend."""

    places: Tensor | None
    parts: Sequence[Piece]
    rotation: Rotation


@dataclass
class Memory:
    """What slots attend to in one layer: keys and values [N, G, E] of step 0, [M, G, E] of each own step since, for the active slots."""

    keys: Tensor
    values: Tensor
    own_keys: list[Tensor] = field(default_factory=list)
    own_values: list[Tensor] = field(default_factory=list)

    def narrow(self, kept: Tensor) -> None:
        """Forget the own steps of slots that stop: `kept` indexes the slots active so far."""
        self.own_keys = [keys.index_select(0, kept) for keys in self.own_keys]
        self.own_values = [values.index_select(0, kept) for values in self.own_values]

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Remember one more own step: `keys` and `values` [M, G, E]."""
        self.own_keys.append(keys)
        self.own_values.append(values)


def unroll(operands: Operands, embedding: Tensor, batch: Batch, steps: int) -> list[Step]:
    """Draft states of `steps` steps from every slot of `batch`.

    `embedding` [V, H] is the target's token embedding. Keys and values of step 0 exist for all N positions, once;
    everything else of the last layer only for slots. Step s of slot t stands at position t + s, takes its own state of step s - 1
    and the row's token t + 1 + s, and sees step 0 of positions up to t and its own steps 1 to s.
    Steps with no slot left are not in the list.
    """
    layers, slots = operands.drafter.decoder, batch.slots
    single = len(layers) == 1  # it asks at slots alone
    rotation = Rotation.of(layers[0].self_attn.rotary, batch.positions)
    fused = fuse(operands, batch.aux)
    embedded = from_embeddings(operands, functional.embedding(batch.next_tokens, embedding), slots if single else None)
    states, normed, memories = over_positions(operands, batch, (fused, embedded), rotation)
    active = torch.arange(len(slots), device=slots.device)
    states, normed = states.index_select(0, slots), normed.index_select(0, slots)
    standing = Standing(slots, pieces(batch, active), rotation)
    states = looked(operands, layers[-1], standing, (states, normed, embedded if single else {}), memories[-1])
    unrolled = [Step(states, active)]
    if not single:
        embedded = {**embedded, "queries": embedded["queries"].index_select(0, slots)}
    for step in range(1, steps):
        kept = (batch.remaining[active] > step).nonzero().flatten()
        if not len(kept):
            break
        active, states = active[kept], fed_back(operands, states).index_select(0, kept)
        standing = Standing(slots[active + step], pieces(batch, active), rotation)
        for memory in memories:
            memory.narrow(kept)
        states = later_step(operands, standing, (states, shifted(embedded, active + step, slots)), memories)
        unrolled.append(Step(states, active))
    return unrolled


def over_positions(
    operands: Operands, batch: Batch, stream: tuple[Tensor, Heads], rotation: Rotation
) -> tuple[Tensor, Tensor, list[Memory]]:
    """Step 0 at all positions: the states [N, H] that enter the last layer, before and behind its norm, and the memory of every layer.

    `stream` are the features [N, H] and what embeddings give of the first layer's heads.
    """
    *before, last = operands.drafter.decoder
    parts = pieces(everywhere(batch), torch.arange(len(batch.positions), device=batch.positions.device)) if before else []
    (states, heads), standing, memories = stream, Standing(None, parts, rotation), []
    for layer in before:
        normed = operands.norm(states, layer.hidden_norm)
        memories.append(Memory(*remembered(operands, layer, standing, (normed, heads))))
        states, heads = looked(operands, layer, standing, (states, normed, heads), memories[-1]), {}
    normed = operands.norm(states, last.hidden_norm)
    return states, normed, [*memories, Memory(*remembered(operands, last, standing, (normed, heads)))]


def later_step(operands: Operands, standing: Standing, stream: tuple[Tensor, Heads], memories: Sequence[Memory]) -> Tensor:
    """Draft states [M, H] of one step behind the first, of states [M, H] and what embeddings give; every memory gets one own step more."""
    states, heads = stream
    for layer, memory in zip(operands.drafter.decoder, memories, strict=True):
        normed = operands.norm(states, layer.hidden_norm)
        memory.add(*remembered(operands, layer, standing, (normed, heads)))
        states, heads = looked(operands, layer, standing, (states, normed, heads), memory), {}
    return states


def shifted(embedded: Heads, index: Tensor, slots: Tensor) -> Heads:
    """What embeddings give where a later step stands: at `index` i64[M] of the `slots` i64[Q], which alone have queries."""
    return {name: heads.index_select(0, index if name == "queries" else slots[index]) for name, heads in embedded.items()}


def fuse(operands: Operands, aux: Tensor) -> Tensor:
    """Features [N, H] of the target's states `aux` [N, 3, H]."""
    drafter = operands.drafter
    if drafter.config.fc_norm:
        weights = [norm.weight for norm in drafter.fc_norm]
        normed = [Norm.apply(state, weight, drafter.config.rms_norm_eps) for state, weight in zip(aux.unbind(1), weights, strict=True)]
        aux = torch.stack(normed, 1)
    return operands.product(aux.flatten(1), drafter.fc.weight)


def from_embeddings(operands: Operands, embeds: Tensor, asking: Tensor | None) -> Heads:
    """The embedding's half of the first layer's heads, of `embeds` [N, H]; queries of those `asking` i64[Q] alone, if it is given."""
    layer, half = operands.drafter.midlayer, slice(embeds.shape[1])
    attention, norm = layer.self_attn, layer.input_layernorm
    embeds = functional.rms_norm(embeds.float(), embeds.shape[-1:], None, norm.eps)

    def product(embeds: Tensor, projection: nn.Linear) -> Tensor:
        return operands.constant_product(embeds, norm.weight, projection.weight, half)

    queries = product(embeds if asking is None else embeds[asking], attention.q_proj)
    return {"queries": queries, "keys": product(embeds, attention.k_proj), "values": product(embeds, attention.v_proj)}


def remembered(operands: Operands, layer: DecoderLayer, standing: Standing, inputs: tuple[Tensor, Heads]) -> tuple[Tensor, Tensor]:
    """Keys and values [T, G, E] that `layer` has of its `inputs`, normed states [T, H] and what embeddings give."""
    (normed, heads), attention, rotation = inputs, layer.self_attn, standing.rotation
    keys = projected(operands, attention.k_proj, normed, heads.get("keys"))
    values = projected(operands, attention.v_proj, normed, heads.get("values"))
    return rotation.turned(keys, standing.places), rotation.heads(values)


def looked(operands: Operands, layer: DecoderLayer, standing: Standing, stream: tuple[Tensor, Tensor, Heads], memory: Memory) -> Tensor:
    """The layer's output [T, H] of states [T, H] before and behind its norm, and what embeddings give."""
    states, normed, heads = stream
    queries = projected(operands, layer.self_attn.q_proj, normed, heads.get("queries"))
    queries = standing.rotation.turned(queries, standing.places)
    attended = attend(standing.parts, queries, (memory.keys, memory.values), (memory.own_keys, memory.own_values))
    return finish(operands, layer, attended, states)


def projected(operands: Operands, projection: nn.Linear, normed: Tensor, embedded: Tensor | None) -> Tensor:
    """Heads [T, n E] of `normed` states [T, H]; in the first layer with what the embedding's half gave of them, `embedded` [T, n E]."""
    made = operands.product(normed, projection.weight, slice(projection.in_features - normed.shape[1], None))
    return made if embedded is None else embedded + made


def finish(operands: Operands, layer: DecoderLayer, attended: Tensor, hidden: Tensor) -> Tensor:
    """The layer's output [T, H] of `attended` [T, A, E] and the residual `hidden` [T, H]."""
    hidden = hidden + operands.product(attended.flatten(1), layer.self_attn.o_proj.weight)
    normed = operands.norm(hidden, layer.post_attention_layernorm)
    gate, up = (operands.product(normed, projection.weight) for projection in (layer.mlp.gate_proj, layer.mlp.up_proj))
    return hidden + operands.product(functional.silu(gate) * up, layer.mlp.down_proj.weight)


def fed_back(operands: Operands, states: Tensor) -> Tensor:
    """What the next draft step takes as features [M, H] after draft `states` [M, H] before `norm`."""
    drafter = operands.drafter
    return operands.norm(states, drafter.norm) if drafter.config.norm_output else states
