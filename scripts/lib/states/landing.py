"""States of a batch on their way into the host's memory, while the engine's device computes the next batch.

Shapes: T tokens and F positions with a teacher of all rows of a batch, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.lib.engines.moving import fetching
from scripts.lib.engines.protocol import RowStates
from scripts.lib.states.checks import Peaks, defect, largest


@dataclass(frozen=True)
class Landed:
    """The rows of one batch: `states` bf16 in the host's memory and the `peaks` of all, to be read after `arrived` if that is given."""

    states: Sequence[RowStates]
    peaks: Peaks
    arrived: torch.cuda.Event | None

    def wait(self) -> Sequence[RowStates]:
        """The states, once they are there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.states

    def defects(self) -> list[str | None]:
        """Why the states of each row must not be trained on, or None; to be asked when they are there."""
        if defect(self.peaks) is None:
            return [None] * len(self.states)
        aux = self.peaks.aux.split([len(state.aux) for state in self.states])
        final = self.peaks.final.split([len(state.final) for state in self.states])
        return [defect(Peaks(*row)) for row in zip(aux, final, strict=True)]


class Landing:
    """Copies batches on a stream of its own. No more than one batch is on its way when the next comes: that bounds the device's memory."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._before: torch.cuda.Event | None = None

    def land(self, states: Sequence[RowStates]) -> Landed:
        """Send the `states` of the rows of a batch on their way, one copy for each kind of them. They may go when this returns."""
        tensors = end_to_end(states)
        device = tensors[0].device
        if device.type != "cuda":
            copies, arrived = fetching(tensors)
        else:
            copies, arrived = self._beside(tensors, device)
            if self._before is not None:
                self._before.synchronize()
            self._before = arrived
        aux, final, argmax, *peaks = copies
        teachers = [len(state.final) for state in states]
        parts = (aux.split([len(state.aux) for state in states]), final.split(teachers), argmax.split(teachers))
        return Landed([RowStates(*row) for row in zip(*parts, strict=True)], Peaks(*peaks), arrived)

    def _beside(self, tensors: Sequence[Tensor], device: torch.device) -> tuple[tuple[Tensor, ...], torch.cuda.Event | None]:
        """Copy once the work that is queued so far is done, beside that which comes."""
        stream = self._stream = self._stream or torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            copies, arrived = fetching(tensors)
        for tensor in tensors:
            tensor.record_stream(stream)  # its memory is not given away before the copy
        return copies, arrived


def end_to_end(states: Sequence[RowStates]) -> tuple[Tensor, ...]:
    """`aux` bf16 [T, 3, H], `final` bf16 [F, H] and `argmax` [F] of all rows of `states`, and the peaks [T, 3] and [F] of the first two."""
    parts = ([getattr(state, name) for state in states] for name in ("aux", "final", "argmax"))
    aux, final, argmax = (own[0] if len(own) == 1 else torch.cat(own) for own in parts)
    aux, final = aux.to(torch.bfloat16), final.to(torch.bfloat16)
    return aux, final, argmax, largest(aux), largest(final)
