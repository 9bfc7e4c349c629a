"""Masters, gradients and optimizer spread over the ranks (FSDP2): each rank keeps its part of every weight.

Every draft step runs through all of the drafter's few layers, so its weights are there whole from the first batch of a step to the last,
in the dtype of matrix products, and only then.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from scripts.lib.eagle3.model import Drafter
from scripts.lib.training.optimizers import ADAMW, move, optimizers
from scripts.lib.training.ranks import as_first, count


class Whole(nn.Module):
    """Runs a function of the drafter while its weights are whole."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(drafter, *arguments)`."""
        return function(self.drafter, *arguments)


class ShardedMasters:
    """As `Masters`, with a part of each weight on each rank. Every rank has to call `step`, `whole`, `exported`, `state` and `load`."""

    def __init__(self, masters: Drafter, dtype: torch.dtype) -> None:
        as_first([parameter.data for parameter in masters.parameters()])
        low = dtype != torch.float32
        policy = MixedPrecisionPolicy(dtype if low else None, torch.float32 if low else None, cast_forward_inputs=False)
        self.root, self.masters, self.compute = Whole(masters), masters, masters
        mesh = init_device_mesh(masters.fc.weight.device.type, (count(),))
        fully_shard(self.root, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self.parts = cast(FSDPModule, self.root)  # which it is from now on
        self.parts.set_gradient_divide_factor(1.0)  # a sum: a slot's share is one of all ranks already
        self.parts.set_force_sum_reduction_for_comms(True)
        self.parts.set_requires_gradient_sync(False)
        self.parts.set_reshard_after_backward(False)
        (self.optimizer,) = optimizers(masters, ADAMW)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(drafter, *arguments)` with whole weights."""
        return self.root(function, *arguments)

    def backward(self, states: Sequence[Tensor], gradients: Sequence[Tensor], head: Tensor) -> None:
        """Add the gradients that come of `gradients` of the draft `states`, and `head` f32[D, H] of the output head."""
        weight = self.compute.lm_head.weight
        own = head.to(weight.dtype)
        weight.grad = own if weight.grad is None else weight.grad + own
        torch.autograd.backward(states, gradients)

    def step(self, learning_rate: float, clip: float) -> Tensor:
        """One step with gradients summed over ranks and clipped to norm `clip`; the norm before (scalar, not waited for)."""
        self.parts.set_requires_gradient_sync(True)
        self.parts.set_reshard_after_backward(True)
        self.root(nothing).backward()  # sums are made in a backward pass, and not every rank had a batch
        self.parts.set_requires_gradient_sync(False)
        self.parts.set_reshard_after_backward(False)
        norm = torch.nn.utils.clip_grad_norm_(self.masters.parameters(), clip)
        move([self.optimizer], learning_rate, forget=True)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """All weights are there inside, whatever the other ranks compute."""
        self.parts.unshard()
        yield
        self.parts.reshard()

    def exported(self) -> Drafter:
        """The drafter in float32 on the CPU."""
        drafter = Drafter(self.masters.config, self.masters.d2t.cpu(), self.masters.t2d.cpu())
        drafter.load_state_dict({name: gathered(tensor) for name, tensor in self.masters.state_dict().items()})
        return drafter

    def state(self) -> dict[str, Any]:
        """Weights and optimizers as one process would have them, on the CPU."""
        optimizer = self.optimizer.state_dict()
        moments = {key: {name: gathered(value) for name, value in entry.items()} for key, entry in optimizer["state"].items()}
        model = {name: gathered(tensor) for name, tensor in self.masters.state_dict().items()}
        return {"model": model, "optimizers": [{**optimizer, "state": moments}]}

    def load(self, content: Mapping[str, Any]) -> None:
        """Take over what `state` gave, of any number of ranks."""
        current = self.masters.state_dict()
        self.masters.load_state_dict({name: shared_out(tensor, current[name]) for name, tensor in content["model"].items()})
        parameters = list(self.masters.parameters())
        (optimizer,) = content["optimizers"]
        moments = {
            key: {name: shared_out(value, parameters[key]) for name, value in entry.items()} for key, entry in optimizer["state"].items()
        }
        self.optimizer.load_state_dict({**optimizer, "state": moments})


def nothing(drafter: Drafter) -> Tensor:
    """Zero, with a gradient of zero for every weight."""
    return torch.stack([parameter.flatten()[0] for parameter in drafter.parameters()]).sum() * 0.0


def gathered(value: Tensor) -> Tensor:
    """The whole of `value` on the CPU."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()


def shared_out(value: Tensor, like: Tensor) -> Tensor:
    """This rank's part of `value` where `like`, of the same shape, lies in parts; a step counter stays as it is."""
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
