"""What a draft distribution is judged by, against the target's distribution on the draft vocabulary.

Every objective takes logits f32[M, D] of the drafter, goals f32[M, D] (probabilities of the target) and shares f32[M]. It
returns the losses f32[M] and leaves in the logits their gradient times the share.
Shapes: M slots, D draft vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Objective = Callable[[Tensor, Tensor, Tensor], Tensor]
SMALLEST = 1e-30  # of an acceptance rate, so that its logarithm exists


def objective(name: str, kl_scale: float, kl_decay: float) -> Objective:
    """The objective that the config calls `name`; `kl_scale` and `kl_decay` are those of `lk_lambda`."""
    if name == "lk_lambda":
        return lambda logits, goal, share: divergence_to_acceptance_(logits, goal, share, kl_scale, kl_decay)
    return {"soft": soft_cross_entropy_, "hard": hard_cross_entropy_, "lk_alpha": log_acceptance_}[name]


def soft_cross_entropy_(logits: Tensor, goal: Tensor, share: Tensor) -> Tensor:
    """Cross-entropy against the whole distribution."""
    aimed = torch.linalg.vecdot(goal, logits)
    highest = logits.amax(-1, keepdim=True)
    total = logits.sub_(highest).exp_().sum(-1, keepdim=True)
    logits.mul_(share[:, None] / total).addcmul_(goal, share[:, None], value=-1)
    return (highest + total.log())[:, 0] - aimed


def hard_cross_entropy_(logits: Tensor, goal: Tensor, share: Tensor) -> Tensor:
    """Cross-entropy against the draft token that the target finds likeliest."""
    chosen = goal.argmax(-1, keepdim=True)
    return soft_cross_entropy_(logits, torch.zeros_like(goal).scatter_(-1, chosen, 1.0), share)


def log_acceptance_(logits: Tensor, goal: Tensor, share: Tensor) -> Tensor:
    """Minus the logarithm of the rate a = sum min(goal, draft) at which speculative sampling accepts a draft (LK loss, alpha)."""
    probabilities = torch.softmax(logits, -1)
    rate, slope = acceptance(probabilities, goal)
    logits.copy_(slope.mul_((-share / rate)[:, None]))
    return -rate.log()


def divergence_to_acceptance_(logits: Tensor, goal: Tensor, share: Tensor, kl_scale: float, kl_decay: float) -> Tensor:
    """w KL(goal, draft) + (1 - w) (1 - a) with w = `kl_scale` exp(-`kl_decay` a) of the slot, taken as constant (LK loss, lambda).

    Far from the target the divergence leads, near to it the acceptance rate a.
    """
    logs = torch.log_softmax(logits, -1)
    probabilities = logs.exp()
    rate, slope = acceptance(probabilities, goal)
    weight = kl_scale * torch.exp(-kl_decay * rate)
    divergence = (torch.xlogy(goal, goal) - goal * logs).sum(-1)
    logits.copy_((probabilities - goal) * (weight * share)[:, None] - slope * ((1 - weight) * share)[:, None])
    return weight * divergence + (1 - weight) * (1 - rate)


def acceptance(probabilities: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """The acceptance rate f32[M] and its derivatives by the logits f32[M, D]."""
    rate = torch.minimum(probabilities, goal).sum(-1).clamp(min=SMALLEST)
    below = torch.where(probabilities < goal, probabilities, 0.0)
    return rate, below - probabilities * below.sum(-1, keepdim=True)
