"""Training-time test on packed batches: every step has the same shapes, and what steps share is computed once.

The first layer's projections see [embedding; state]. The embedding's half of slot t at step s is that of slot t + s at step 0,
so it is computed once for the batch and shifted. Slots whose span ends before a step compute on, and count nothing.
Of step 0, every layer needs keys and values at all positions, so all layers but the last run there; what they give is also their
slots' part of step 0, in which the last layer alone is left to run.
With products in 8 bits, all of a layer's are but the queries, keys and values of the last one at the first step.
Shapes: N positions and Q slots of a batch, H hidden size, A attention heads, G key/value heads, E head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from scripts.lib.eagle3.model import DecoderLayer, Drafter
from scripts.lib.training.fp8_products import Fp8Weight, fp8_mlp, fp8_product, fp8_weight
from scripts.lib.training.packed import PackedBatch, everywhere
from scripts.lib.training.row_attention import FirstKeys, block_first_keys, dense_first_keys, join

Weight = Tensor | Fp8Weight  # [O, I]
Norm = tuple[Tensor, float]  # weight and epsilon
Turn = tuple[Tensor, Tensor]  # cosine and sine f32[T, E]
KeysValues = tuple[Tensor, Tensor]  # of step 0 [N, G, E], or of a later step [Q, G, E]
Stream = tuple[Tensor, Tensor | None, Turn]  # states [T, H], the embedding's half of their heads in the first layer, their rotation


@dataclass(frozen=True)
class Kernels:
    """The pieces of a step, plain or compiled."""

    project: Callable[..., Any]
    join: Callable[..., Any]
    finish: Callable[..., Any]
    norm: Callable[..., Any]
    first_keys: Callable[[PackedBatch], FirstKeys]
    run: Callable[..., Any]  # runs a draft step: keeps what it computes, or computes it again in the backward pass
    weight: Callable[[Tensor], Weight]  # as the products of a batch take a weight


def plain_kernels(recompute: bool = False, fp8: bool = False) -> Kernels:
    """Torch operations one by one, for any device; `fp8` for products in 8 bits."""
    run, weight = again if recompute else once, fp8_weight if fp8 else as_it_is
    return Kernels(project, join, finish, normed, dense_first_keys, run, weight)


def compiled_kernels(recompute: bool = False, fp8: bool = False) -> Kernels:
    """Each piece compiled into few kernels, FlexAttention for the first keys; for CUDA. Every capacity compiles anew."""
    attention = compiled(flex_attention)
    plain, pieces = plain_kernels(recompute, fp8), ("project", "join", "finish", "norm", *(["weight"] if fp8 else []))
    changed: dict[str, Any] = {name: compiled(getattr(plain, name)) for name in pieces}
    return replace(plain, first_keys=lambda batch: block_first_keys(batch, attention), **changed)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` in few kernels, anew for each shape."""
    return torch.compile(function, fullgraph=True, dynamic=False)


def as_it_is(weight: Tensor) -> Tensor:
    """`weight`."""
    return weight


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


def times(rows: Tensor, weight: Weight, added: Tensor | None = None) -> Tensor:
    """`rows` [T, I] times `weight` [O, I], and `added` [T, O] if there is something: [T, O]."""
    if isinstance(weight, Fp8Weight):
        product = fp8_product(rows, weight)
        return product if added is None else added + product
    return rows @ weight.t() if added is None else torch.addmm(added, rows, weight.t())


def project(states: Tensor, norm: Norm, embedded: Tensor | None, heads: tuple[Weight, int], turn: Turn) -> tuple[Tensor, Tensor]:
    """Heads of `states` [T, H]: the first ones rotated [T, turned, E], and the others [T, rest, E].

    `heads` are the projections [heads * E, H] on states and how many heads turn; `embedded` [T, heads * E] is what the
    embedding's half gave, in the first layer.
    """
    weight, turned = heads
    cos, sin = turn
    states = normed(states, norm)
    made = times(states, weight, embedded).unflatten(-1, (-1, cos.shape[-1]))
    wide = made[:, :turned].float()
    first, second = wide.chunk(2, -1)
    rotated = wide * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
    return rotated.to(states.dtype), made[:, turned:].clone()


def finish(attended: Tensor, hidden: Tensor, norm: Norm, weights: tuple[Weight, Weight, Weight]) -> Tensor:
    """The layer's output [Q, H] from `attended` [Q, A, E] and the residual `hidden` [Q, H].

    `weights` are those of the attention's output [H, A E], of gate and up [2I, H], and of down [H, I].
    """
    out, gate_up, down = weights
    hidden = times(attended.flatten(1), out, hidden)
    states = normed(hidden, norm)
    if isinstance(gate_up, Fp8Weight) and isinstance(down, Fp8Weight):
        return hidden + fp8_mlp(states, gate_up, down)
    gate, up = times(states, gate_up).chunk(2, -1)
    return times(functional.silu(gate) * up, down, hidden)


@dataclass(frozen=True)
class LayerWeights:
    """A layer's weights as a step wants them, projections joined."""

    on_embeds: Tensor  # [(A + 2G) E, H], or no columns behind the first layer
    on_states: Tensor  # [(A + 2G) E, H]
    heads_on_states: Weight  # the same, for products of all of it
    finish: tuple[Weight, Weight, Weight]  # attention's output [H, A E], gate and up [2I, H], down [H, I]
    norms: tuple[Norm, Norm]  # before attention and before the MLP
    heads: tuple[int, int]  # A and G
    width: int  # A E

    @classmethod
    def of(cls, layer: DecoderLayer, drafter: Drafter, weight: Callable[[Tensor], Weight]) -> "LayerWeights":
        """Join the weights of `layer` of `drafter` and make each a `weight`; gradients flow back to them."""
        config, attention, mlp = drafter.config, layer.self_attn, layer.mlp
        joined = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        embeds = config.hidden_size if layer.first else 0  # columns that see embeddings
        on_states = joined[:, embeds:].contiguous()
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        return cls(
            on_embeds=joined[:, :embeds].contiguous(),
            on_states=on_states,
            heads_on_states=weight(on_states),
            finish=(weight(attention.o_proj.weight), weight(gate_up), weight(mlp.down_proj.weight)),
            norms=((layer.hidden_norm.weight, config.rms_norm_eps), (layer.post_attention_layernorm.weight, config.rms_norm_eps)),
            heads=(config.num_attention_heads, config.num_key_value_heads),
            width=config.num_attention_heads * config.head_dim,
        )


@dataclass(frozen=True)
class Memory:
    """What slots attend to in one layer: keys and values of step 0, and those of each own step since."""

    attend: FirstKeys
    first: KeysValues
    own: tuple[KeysValues, ...] = ()

    def attended(self, kernels: Kernels, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[Q, A, E] of `queries` [Q, A, E] over all of it and the `keys` and `values` [Q, G, E] of the step itself."""
        output, lse = self.attend(queries, *self.first)
        own_keys, own_values = zip(*self.own, (keys, values), strict=True)
        return kernels.join(queries, output, lse, list(own_keys), list(own_values))


def unroll_packed(drafter: Drafter, embedding: Tensor, batch: PackedBatch, steps: int, kernels: Kernels) -> list[Tensor]:
    """For each of `steps` steps the draft states [Q, H] behind the last norm, what the head reads.

    `embedding` [V, H] is the target's. Rows of slots that are not trained at a step hold finite numbers of no meaning.
    """
    layers, count = [LayerWeights.of(layer, drafter, kernels.weight) for layer in drafter.decoder], len(batch.slots)
    fused = drafter.fuse(batch.aux)
    embedded, shared = from_embeddings(drafter, layers, embedding, batch, kernels)
    embedded = functional.pad(embedded, (0, 0, 0, steps - 1))
    states, first = over_positions(layers, kernels, batch, (fused, shared, rotations(drafter, batch.positions)))
    attend = kernels.first_keys(batch)
    memories = [Memory(attend, keys_values) for keys_values in first]
    # index_select, as the gradient of plain indexing sorts on CUDA.
    states = states.index_select(0, batch.slots)
    norm, outputs = (drafter.norm.weight, drafter.config.rms_norm_eps), []
    for step in range(steps):
        turn = rotations(drafter, batch.positions[batch.slots] + step)
        if step == 0:
            opening = embedded[:count] if len(layers) == 1 else None
            states, output = kernels.run(first_step, layers[-1], kernels, memories[-1], (states, opening, turn), norm)
        else:
            stream = (states, embedded[step : step + count], turn)
            states, output, added = kernels.run(later_step, layers, kernels, memories, stream, norm)
            memories = [replace(memory, own=(*memory.own, new)) for memory, new in zip(memories, added, strict=True)]
        outputs.append(output)
        states = output if drafter.config.norm_output else states
    return outputs


def over_positions(layers: Sequence[LayerWeights], kernels: Kernels, batch: PackedBatch, stream: Stream) -> tuple[Tensor, list[KeysValues]]:
    """States [N, H] of step 0 that enter the last layer at all positions, and the keys and values [N, G, E] of every layer there.

    `stream` are the features. The embedding's half of their heads is of all heads, but of keys and values alone for a single layer.
    """
    *before, last = layers
    if before:
        attend = kernels.first_keys(everywhere(batch))
    found = []
    for layer in before:
        states, keys_values = kernels.run(run_layer, layer, kernels, stream, lambda *heads: attend(*heads)[0])
        stream = (states, None, stream[2])
        found.append(keys_values)
    states, embedded, turn = stream
    projection = (last.on_states[last.width :], last.heads[1])
    return states, [*found, kernels.project(states, last.norms[0], embedded, projection, turn)]


def first_step(layer: LayerWeights, kernels: Kernels, memory: Memory, stream: Stream, norm: Norm) -> tuple[Tensor, Tensor]:
    """Draft states [Q, H] of step 0 before and behind the last norm: `layer`, the last one, at the slots, whose keys are the positions'."""
    states, embedded, turn = stream
    asking = None if embedded is None else embedded[:, : layer.width]
    queries, _ = kernels.project(states, layer.norms[0], asking, (layer.on_states[: layer.width], layer.heads[0]), turn)
    attended, _ = memory.attend(queries, *memory.first)
    states = kernels.finish(attended, states, layer.norms[1], layer.finish)
    return states, kernels.norm(states, norm)


def later_step(
    layers: Sequence[LayerWeights], kernels: Kernels, memories: Sequence[Memory], stream: Stream, norm: Norm
) -> tuple[Tensor, Tensor, list[KeysValues]]:
    """Draft states [Q, H] of one step before and behind the last norm, and the keys and values [Q, G, E] that it adds in each layer."""
    added = []
    for layer, memory in zip(layers, memories, strict=True):
        states, keys_values = run_layer(layer, kernels, stream, partial(memory.attended, kernels))
        stream = (states, None, stream[2])
        added.append(keys_values)
    return stream[0], kernels.norm(stream[0], norm), added


def run_layer(layer: LayerWeights, kernels: Kernels, stream: Stream, attend: Callable[..., Tensor]) -> tuple[Tensor, KeysValues]:
    """What `layer` makes of `stream`, [T, H], and its keys and values [T, G, E]; `attend` gives [T, A, E] of queries, keys and values."""
    states, embedded, turn = stream
    turned, values = kernels.project(states, layer.norms[0], embedded, (layer.heads_on_states, sum(layer.heads)), turn)
    queries, keys = turned.split(layer.heads, 1)
    attended = attend(queries, keys, values)
    return kernels.finish(attended, states, layer.norms[1], layer.finish), (keys, values)


def from_embeddings(
    drafter: Drafter, layers: Sequence[LayerWeights], embedding: Tensor, batch: PackedBatch, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """The embedding's half of the first layer's heads at the slots [Q, (A + 2G) E], and at all positions.

    There it is [N, (A + 2G) E], or [N, 2G E] of keys and values for a single layer, which asks at slots only.
    """
    weight, width = drafter.midlayer.input_layernorm.weight, layers[0].width
    embeds = functional.embedding(batch.next_tokens, embedding).to(batch.aux.dtype)
    embeds = kernels.norm(embeds, (weight, drafter.config.rms_norm_eps))
    if len(layers) > 1:
        heads = embeds @ layers[0].on_embeds.t()
        return heads.index_select(0, batch.slots), heads
    keys = embeds @ layers[0].on_embeds[width:].t()
    queries = embeds.index_select(0, batch.slots) @ layers[0].on_embeds[:width].t()
    return torch.cat([queries, keys.index_select(0, batch.slots)], 1), keys


def rotations(drafter: Drafter, positions: Tensor) -> Turn:
    """Cosine and sine f32[T, E] by which rotary embedding turns heads at `positions` [T]."""
    rotary = drafter.midlayer.self_attn.rotary
    rotary.frequencies = rotary.frequencies.to(positions.device)  # kept there: a copy would wait for the device at every step
    angles = positions[:, None].float() * rotary.frequencies
    angles = torch.cat([angles, angles], -1)
    return angles.cos() * rotary.scaling, angles.sin() * rotary.scaling
