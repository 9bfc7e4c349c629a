"""What moves a drafter's weights: AdamW all of them, or Muon the matrices inside and AdamW the head and the norms.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) takes for a matrix's step the nearest orthogonal matrix to its
momentum, at the length that AdamW's steps have (Liu et al. 2025, arXiv 2502.16982), so that one learning rate serves both.
"""

from collections.abc import Sequence

import torch

from scripts.lib.eagle3.model import Drafter

ADAMW, MUON = "adamw", "muon"
BETAS = (0.9, 0.95)


def optimizers(drafter: Drafter, kind: str) -> list[torch.optim.Optimizer]:
    """The optimizers of all weights of `drafter`; each step sets their learning rate."""
    if kind == ADAMW:
        return [adamw(list(drafter.parameters()))]
    inner: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for parameter in drafter.parameters():
        (inner if parameter.dim() == 2 and parameter is not drafter.lm_head.weight else rest).append(parameter)
    return [torch.optim.Muon(inner, lr=0.0, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"), adamw(rest)]


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.AdamW:
    """AdamW of `parameters`."""
    return torch.optim.AdamW(parameters, lr=0.0, betas=BETAS, weight_decay=0.0, fused=True)


def move(parts: Sequence[torch.optim.Optimizer], learning_rate: float, forget: bool) -> None:
    """One step of all `parts` at `learning_rate`; gradients are let go afterwards if `forget`, and otherwise set to nought."""
    for part in parts:
        for group in part.param_groups:
            group["lr"] = learning_rate
        part.step()
        part.zero_grad(set_to_none=forget)
