"""Copies between the host's memory and a GPU's that make no thread wait for what else the GPU has to do.

A copy from or to pageable memory waits until the stream has done all that is queued. Page-locked memory comes from torch's own cache,
which gives a block away again only when nobody holds it and the copies from and to it are done.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; of a GPU the current stream copies."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def fetched(*tensors: Tensor) -> tuple[Tensor, ...]:
    """`tensors` in the host's memory, after one wait for all of them."""
    copies, arrived = fetching(tensors)
    if arrived is not None:
        arrived.synchronize()
    return copies


def fetching(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], torch.cuda.Event | None]:
    """`tensors`, all of one device, in the host's memory; from a GPU they are there after the event, and the current stream copies."""
    if tensors[0].device.type != "cuda":
        return tuple(tensor.cpu() for tensor in tensors), None
    copies = tuple(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors)
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event(blocking=True)
    arrived.record(torch.cuda.current_stream(tensors[0].device))
    return copies, arrived
