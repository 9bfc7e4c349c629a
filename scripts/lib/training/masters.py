"""Weights in float32 that the optimizer moves, and their copies in the dtype of matrix products.

A bf16 weight near 1 does not move by less than 1/256: small steps must add up somewhere finer.
"""

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from scripts.lib.eagle3.model import Drafter
from scripts.lib.training.optimizers import ADAMW, move, optimizers
from scripts.lib.training.ranks import add_up, as_first


class DrafterWeights(Protocol):
    """What a step and the training loop ask of weights, wherever they lie; every rank calls all of it in the same order."""

    masters: Drafter
    compute: Drafter

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(drafter, *arguments)` of the drafter that computes."""
        ...

    def backward(self, states: Sequence[Tensor], gradients: Sequence[Tensor], head: Tensor) -> None:
        """Add to the masters' gradients what comes of `gradients` of the draft `states`, and `head` f32[D, H] of the output head."""
        ...

    def step(self, learning_rate: float, clip: float) -> Tensor:
        """One step with gradients summed over ranks and clipped to norm `clip`; the norm before (scalar, not waited for)."""
        ...

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """All weights are there inside."""
        ...

    def exported(self) -> Drafter:
        """The drafter in float32."""
        ...

    def state(self) -> dict[str, Any]:
        """Weights and optimizers as one process has them, for a checkpoint."""
        ...

    def load(self, content: Mapping[str, Any]) -> None:
        """Take over what `state` gave, of any number of ranks."""
        ...


class Masters:
    """`masters` is the drafter in float32, `compute` the one that runs: the same one when `dtype` is float32.

    Gradients are let go after a step, or set to nought where they are if they are to `keep` their place.
    """

    def __init__(self, masters: Drafter, dtype: torch.dtype, optimizer: str = ADAMW, keep: bool = True) -> None:
        self.masters, self.keep = masters, keep
        as_first([parameter.data for parameter in masters.parameters()])
        self.compute = masters if dtype == torch.float32 else copy.deepcopy(masters).to(dtype)
        self.optimizers = optimizers(masters, optimizer)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(drafter, *arguments)` of the drafter that computes."""
        return function(self.compute, *arguments)

    def backward(self, states: Sequence[Tensor], gradients: Sequence[Tensor], head: Tensor) -> None:
        """Add to the masters' gradients what comes of `gradients` of the draft `states`, and `head` f32[D, H] of the output head."""
        torch.autograd.backward(states, gradients)
        self.take_gradients(head)

    def take_gradients(self, head: Tensor) -> None:
        """Add to the masters' gradients what lies in the copies', and `head` f32[D, H] of the output head; empty the copies'."""
        self._add(self.masters.lm_head.weight, head)
        if self.compute is not self.masters:
            for master, weight in zip(self.masters.parameters(), self.compute.parameters(), strict=True):
                if weight.grad is not None:
                    self._add(master, weight.grad)
                    weight.grad = None

    def step(self, learning_rate: float, clip: float) -> Tensor:
        """One step with gradients summed over ranks and clipped to norm `clip`; the norm before (scalar, not waited for)."""
        for parameter in self.masters.parameters():
            if parameter.grad is None:  # this rank had no batch
                parameter.grad = torch.zeros_like(parameter)
        add_up(*(parameter.grad for parameter in self.masters.parameters() if parameter.grad is not None))
        norm = torch.nn.utils.clip_grad_norm_(self.masters.parameters(), clip)
        move(self.optimizers, learning_rate, forget=not self.keep)
        self.publish()
        return norm

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the copies to where the masters stand."""
        if self.compute is not self.masters:
            torch._foreach_copy_(list(self.compute.parameters()), list(self.masters.parameters()))

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """All weights are there inside: they always are."""
        return contextlib.nullcontext()

    def exported(self) -> Drafter:
        """The drafter in float32."""
        return self.masters

    def state(self) -> dict[str, Any]:
        """Weights and optimizers, for a checkpoint."""
        return {"model": self.masters.state_dict(), "optimizers": [part.state_dict() for part in self.optimizers]}

    def load(self, content: Mapping[str, Any]) -> None:
        """Take over what `state` gave."""
        self.masters.load_state_dict(content["model"])
        for part, state in zip(self.optimizers, content["optimizers"], strict=True):
            part.load_state_dict(state)
        self.publish()

    @staticmethod
    def _add(master: Tensor, gradient: Tensor) -> None:
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad += gradient
