"""Training-time test: the drafter drafts K steps ahead from every trained slot at once, as it will when serving.

Shapes: N positions of a batch, Q slots (queries exist only here), M slots still drafting at a step, H hidden size,
A attention heads, G key/value heads, E head size, L positions of one row.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from scripts.lib.eagle3.model import Drafter
from scripts.lib.training.batches import Batch


@dataclass(frozen=True)
class Step:
    """States of one step: `states` [M, H] before `norm`, of the slots `active` i64[M] (indices into the Q slots)."""

    states: Tensor
    active: Tensor


@dataclass
class Memory:
    """What slots attend to: keys and values [N, G, E] of step 0, and [M, G, E] of each own step since, for the active slots."""

    keys: Tensor
    values: Tensor
    own_keys: list[Tensor]
    own_values: list[Tensor]

    def narrow(self, kept: Tensor) -> None:
        """Forget the own steps of slots that stop: `kept` indexes the slots active so far."""
        self.own_keys = [keys[kept] for keys in self.own_keys]
        self.own_values = [values[kept] for values in self.own_values]


def unroll(drafter: Drafter, embedding: Tensor, batch: Batch, steps: int) -> list[Step]:
    """Draft states of `steps` steps from every slot of `batch`.

    `embedding` [V, H] is the target's token embedding. Keys and values of step 0 exist for all N positions, once;
    everything else only for slots. Step s of slot t stands at position t + s, takes its own state of step s - 1 and
    the row's token t + 1 + s, and sees step 0 of positions up to t and its own steps 1 to s.
    Steps with no slot left are not in the list.
    """
    layer = drafter.midlayer
    embeds = functional.embedding(batch.next_tokens, embedding).to(batch.aux.dtype)
    fused = drafter.fuse(batch.aux)
    inputs = layer.inputs(embeds, fused)
    memory = Memory(*layer.self_attn.keys_values(inputs, batch.positions), [], [])
    active = torch.arange(len(batch.slots), device=batch.slots.device)
    queries = layer.self_attn.queries(inputs[batch.slots], batch.positions[batch.slots])
    states = layer.finish(attend(queries, memory, batch, active), fused[batch.slots])
    unrolled = [Step(states, active)]
    for step in range(1, steps):
        kept = (batch.remaining[active] > step).nonzero().flatten()
        if not len(kept):
            break
        active, hidden = active[kept], drafter.fed_back(states[kept])
        memory.narrow(kept)
        places = batch.slots[active] + step
        inputs = layer.inputs(embeds[places], hidden)
        keys, values = layer.self_attn.keys_values(inputs, batch.positions[places])
        memory.own_keys.append(keys)
        memory.own_values.append(values)
        queries = layer.self_attn.queries(inputs, batch.positions[places])
        states = layer.finish(attend(queries, memory, batch, active), hidden)
        unrolled.append(Step(states, active))
    return unrolled


def attend(queries: Tensor, memory: Memory, batch: Batch, active: Tensor) -> Tensor:
    """Attention output [M, A, E] of `queries` [M, A, E], row by row.

    Within a row each slot sees the first keys up to its own position and, of the own steps, only its own.
    This is the one place that knows the mask: a kernel with block masks can take it over.
    """
    borders = torch.searchsorted(active, torch.tensor(batch.slot_starts, device=active.device)).tolist()
    outputs = []
    for row, (start, end) in enumerate(pairwise(borders)):
        if start == end:
            continue
        first, last = batch.row_starts[row], batch.row_starts[row + 1]
        keys = torch.cat([memory.keys[first:last], *(own[start:end] for own in memory.own_keys)])
        values = torch.cat([memory.values[first:last], *(own[start:end] for own in memory.own_values)])
        places = batch.positions[batch.slots[active[start:end]]]
        earlier = torch.arange(last - first, device=active.device) <= places[:, None]
        own = torch.eye(end - start, dtype=torch.bool, device=active.device).repeat(1, len(memory.own_keys))
        output = functional.scaled_dot_product_attention(
            queries[start:end].transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            torch.cat([earlier, own], 1),
            enable_gqa=True,
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)
