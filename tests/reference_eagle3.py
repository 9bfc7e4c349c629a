"""EAGLE-3 training written down plainly: loops, explicit masks, full logits. It defines what the fast path must compute.

One row at a time and one slot at a time, from the paper (arXiv 2503.01840) and `docs/design.md`, sections 4 and 7.
Shapes: T tokens of a row, H hidden size, A heads, G key/value heads, E head size, D draft vocabulary, V target vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


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

    def attention_input(self, embed: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat(
            [
                norm(embed, self.w["midlayer.input_layernorm.weight"], self.eps),
                norm(hidden, self.w["midlayer.hidden_norm.weight"], self.eps),
            ]
        )

    def key_value(self, x: Tensor, position: int) -> tuple[list[Tensor], list[Tensor]]:
        keys = heads(self.w["midlayer.self_attn.k_proj.weight"] @ x, self.head_dim)
        values = heads(self.w["midlayer.self_attn.v_proj.weight"] @ x, self.head_dim)
        return [rotate(key, position, self.theta) for key in keys], values

    def layer(self, x: Tensor, hidden: Tensor, position: int, seen: list[tuple[list[Tensor], list[Tensor]]]) -> Tensor:
        """Output before the last norm of one slot that sees exactly the list `seen` of (keys, values)."""
        queries = heads(self.w["midlayer.self_attn.q_proj.weight"] @ x, self.head_dim)
        groups = len(seen[0][0])
        attended = []
        for number, query in enumerate(queries):
            rotated = rotate(query, position, self.theta)
            group = number // (len(queries) // groups)
            weights = torch.softmax(torch.stack([rotated @ keys[group] / math.sqrt(self.head_dim) for keys, _ in seen]), 0)
            attended.append(sum(weight * values[group] for weight, (_, values) in zip(weights, seen, strict=True)))
        hidden = hidden + self.w["midlayer.self_attn.o_proj.weight"] @ torch.cat(attended)
        y = norm(hidden, self.w["midlayer.post_attention_layernorm.weight"], self.eps)
        gate, up = self.w["midlayer.mlp.gate_proj.weight"] @ y, self.w["midlayer.mlp.up_proj.weight"] @ y
        return hidden + self.w["midlayer.mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.w["lm_head.weight"] @ norm(hidden, self.w["norm.weight"], self.eps)


def states(drafter: ReferenceDrafter, embedding: Tensor, row: ReferenceRow, steps: int) -> list[dict[int, Tensor]]:
    """For each step, the state [H] of every slot trained at it, by slot."""
    places = range(len(row.tokens) - 1)
    fused = [drafter.fuse(row.aux[t]) for t in places]
    inputs = [drafter.attention_input(embedding[row.tokens[t + 1]], fused[t]) for t in places]
    first = [drafter.key_value(inputs[t], t) for t in places]
    own: dict[int, list[tuple[list[Tensor], list[Tensor]]]] = {t: [] for t in places}
    found: list[dict[int, Tensor]] = []
    for step in range(steps):
        here = {}
        for t in places:
            if not row.trained(t, step):
                continue
            if step == 0:
                hidden, x = fused[t], inputs[t]
            else:
                hidden = drafter.fed_back(found[step - 1][t])
                x = drafter.attention_input(embedding[row.tokens[t + 1 + step]], hidden)
                own[t].append(drafter.key_value(x, t + step))
            here[t] = drafter.layer(x, hidden, t + step, first[: t + 1] + own[t])
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
