"""EAGLE-3 training written down plainly: loops, explicit masks, full logits. It defines what the fast path must compute.

One row at a time and one slot at a time, from the paper (arXiv 2503.01840) and `docs/design.md`, sections 4 and 7.
Shapes: T tokens of a row, H hidden size, A heads, G key/value heads, E head size, D draft vocabulary, V target vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

KeyValue = tuple[list[Tensor], list[Tensor]]  # of each key/value head


@dataclass
class ReferenceRow:
    """`tokens` i64[T], `aux` [T, 3H], `final` [T, H] at every token (post-norm), `spans` of half-open ranges."""

    tokens: Tensor
    aux: Tensor
    final: Tensor
    spans: list[tuple[int, int]]

    def span_of(self, slot: int) -> tuple[int, int] | None:
        """The span in which both tokens that `slot` needs lie: t + 1, which it takes, and t + 2, which it predicts."""
        if slot < 0:
            return None
        return next(((start, end) for start, end in self.spans if start <= slot + 1 and slot + 2 < end), None)

    def trained(self, slot: int, step: int) -> bool:
        """Whether `slot` is trained at `step`: it and slot + step are trained at step 0 in the same span."""
        return self.span_of(slot) is not None and self.span_of(slot) == self.span_of(slot + step)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """Turn one head [E]: dimension i pairs with i + E/2."""
    half = len(x) // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        c, s = math.cos(angle), math.sin(angle)
        out = out.clone()
        out[i] = x[i] * c - x[i + half] * s
        out[i + half] = x[i + half] * c + x[i] * s
    return out


def heads(x: Tensor, size: int) -> list[Tensor]:
    return list(x.split(size))


class ReferenceDrafter:
    """The drafter as plain arithmetic on a dict of weights `w` under their exported names."""

    def __init__(self, w: dict[str, Tensor], head_dim: int, theta: float, eps: float, norm_output: bool = False) -> None:
        self.w, self.head_dim, self.theta, self.eps, self.norm_output = w, head_dim, theta, eps, norm_output

    def fuse(self, aux: Tensor) -> Tensor:
        """Each third of `aux` [3H] normed where the drafter has weights for that, then the linear layer."""
        if "fc_norm.0.weight" in self.w:
            aux = torch.cat([norm(part, self.w[f"fc_norm.{number}.weight"], self.eps) for number, part in enumerate(aux.chunk(3))])
        return self.w["fc.weight"] @ aux

    def fed_back(self, hidden: Tensor) -> Tensor:
        return norm(hidden, self.w["norm.weight"], self.eps) if self.norm_output else hidden

    def layers(self) -> int:
        return sum(name.endswith("o_proj.weight") for name in self.w)

    def weight(self, layer: int, name: str) -> Tensor:
        return self.w[f"{f'layers.{layer}' if layer else 'midlayer'}.{name}.weight"]

    def attention_input(self, layer: int, embed: Tensor, hidden: Tensor) -> Tensor:
        """The first layer sees the embedding beside the stream, the others the stream alone."""
        stream = norm(hidden, self.weight(layer, "hidden_norm"), self.eps)
        return stream if layer else torch.cat([norm(embed, self.weight(0, "input_layernorm"), self.eps), stream])

    def key_value(self, layer: int, x: Tensor, position: int) -> KeyValue:
        keys = heads(self.weight(layer, "self_attn.k_proj") @ x, self.head_dim)
        values = heads(self.weight(layer, "self_attn.v_proj") @ x, self.head_dim)
        return [rotate(key, position, self.theta) for key in keys], values

    def layer(self, layer: int, x: Tensor, hidden: Tensor, position: int, seen: list[KeyValue]) -> Tensor:
        """What goes on from `layer` for one slot that sees exactly the list `seen` of (keys, values)."""
        queries = heads(self.weight(layer, "self_attn.q_proj") @ x, self.head_dim)
        groups = len(seen[0][0])
        attended = []
        for number, query in enumerate(queries):
            rotated = rotate(query, position, self.theta)
            group = number // (len(queries) // groups)
            weights = torch.softmax(torch.stack([rotated @ keys[group] / math.sqrt(self.head_dim) for keys, _ in seen]), 0)
            attended.append(sum(weight * values[group] for weight, (_, values) in zip(weights, seen, strict=True)))
        hidden = hidden + self.weight(layer, "self_attn.o_proj") @ torch.cat(attended)
        y = norm(hidden, self.weight(layer, "post_attention_layernorm"), self.eps)
        gate, up = self.weight(layer, "mlp.gate_proj") @ y, self.weight(layer, "mlp.up_proj") @ y
        return hidden + self.weight(layer, "mlp.down_proj") @ (torch.nn.functional.silu(gate) * up)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.w["lm_head.weight"] @ norm(hidden, self.w["norm.weight"], self.eps)


def states(drafter: ReferenceDrafter, embedding: Tensor, row: ReferenceRow, steps: int) -> list[dict[int, Tensor]]:
    """For each step, the state [H] of every slot trained at it, by slot.

    Step 0 is one causal pass of all layers over the row; a later step of a slot sees, in each layer, that pass up to the slot, and
    what its own steps before left there.
    """
    places, layers = range(len(row.tokens) - 1), range(drafter.layers())
    stream = [drafter.fuse(row.aux[t]) for t in places]
    first: list[list[KeyValue]] = []
    own: list[dict[int, list[KeyValue]]] = [{t: [] for t in places} for _ in layers]
    for number in layers:
        inputs = [drafter.attention_input(number, embedding[row.tokens[t + 1]], stream[t]) for t in places]
        first.append([drafter.key_value(number, inputs[t], t) for t in places])
        stream = [drafter.layer(number, inputs[t], stream[t], t, first[number][: t + 1]) for t in places]
    found = [{t: stream[t] for t in places if row.trained(t, 0)}]
    for step in range(1, steps):
        here = {}
        for t in places:
            if not row.trained(t, step):
                continue
            hidden = drafter.fed_back(found[step - 1][t])
            for number in layers:
                x = drafter.attention_input(number, embedding[row.tokens[t + 1 + step]], hidden)
                own[number][t].append(drafter.key_value(number, x, t + step))
                hidden = drafter.layer(number, x, hidden, t + step, first[number][: t + 1] + own[number][t])
            here[t] = hidden
        found.append(here)
    return found


@dataclass
class ReferenceTarget:
    """`embedding` and `head` [V, H], and the tables of the draft vocabulary."""

    embedding: Tensor
    head: Tensor
    d2t: Tensor
    t2d: Tensor


def teacher(final: Tensor, head: Tensor, t2d: Tensor) -> Tensor:
    """Probabilities [V] that the target gives the next token, those outside the draft vocabulary cut and the rest renormalised."""
    probabilities = torch.softmax(head @ final, 0) * t2d
    return probabilities / probabilities.sum()


def slot_loss(goal: Tensor, log_probabilities: Tensor, kind: str) -> Tensor:
    """The loss of one slot from the target's probabilities and the drafter's log-probabilities, both [D]."""
    if kind == "hard":
        return -log_probabilities[goal.argmax()]
    accepted = torch.minimum(goal, log_probabilities.exp()).sum()
    if kind == "lk_alpha":
        return -torch.log(accepted)
    if kind == "lk_lambda":
        weight = 0.9 * torch.exp(-2.0 * accepted.detach())
        return weight * (goal * (goal.log() - log_probabilities)).sum() + (1 - weight) * (1 - accepted)
    return -(goal * log_probabilities).sum()


def loss(
    drafter: ReferenceDrafter, target: ReferenceTarget, rows: list[ReferenceRow], steps: int, decay: float, *, kind: str = "soft"
) -> tuple[Tensor, list[Tensor]]:
    """Sum over steps of decay^step times the mean over slots trained at that step, in all rows together; and those means.

    Draft logits are spread over the full vocabulary [V], minus infinity where no draft token is.
    """
    found = [states(drafter, target.embedding, row, steps) for row in rows]
    means = []
    for step in range(steps):
        terms = []
        for row, row_states in zip(rows, found, strict=True):
            for slot, hidden in row_states[step].items():
                full = torch.full((len(target.head),), -math.inf)
                full = full.index_put((torch.arange(len(target.d2t)) + target.d2t,), drafter.logits(hidden))
                goal = teacher(row.final[slot + 1 + step], target.head, target.t2d)
                log_probabilities = torch.log_softmax(full, 0)
                terms.append(slot_loss(goal[target.t2d], log_probabilities[target.t2d], kind))
        if terms:
            means.append(torch.stack(terms).mean())
    return torch.stack([decay**step * mean for step, mean in enumerate(means)]).sum(), means
