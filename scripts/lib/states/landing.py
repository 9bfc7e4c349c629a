"""States of a batch on their way into the host's memory, while the engine's device computes the next batch.

Shapes: T tokens and F positions with a teacher of all rows of a batch, H hidden size.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.lib.engines.moving import fetching, sent
from scripts.lib.engines.protocol import RowStates
from scripts.lib.states.checks import Peaks, defect, largest
from scripts.lib.states.rounded import Rounded, rounded_aux, rounded_final
from scripts.lib.states.rounding import FP8

PLAIN = 5  # tensors that are copied of all batches: states, choices and peaks; those behind them are rounded


@dataclass(frozen=True)
class Landed:
    """The rows of one batch, of so many `tokens` each, in the host's memory: to be read after `arrived` if that is given.

    `states` bf16 are as the engine gave them, and `peaks` are those of all. What was `rounded` on a device takes the place of the aux
    states: there are none then, but for the row that was asked for.
    """

    tokens: Sequence[int]
    states: Sequence[RowStates]
    rounded: Sequence[Rounded]
    peaks: Peaks
    arrived: torch.cuda.Event | None

    def wait(self) -> Sequence[RowStates]:
        """The states, once they are there, and the rounded ones with them."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.states

    def defects(self) -> list[str | None]:
        """Why the states of each row must not be trained on, or None; to be asked when they are there."""
        if defect(self.peaks) is None:
            return [None] * len(self.states)
        aux = self.peaks.aux.split(list(self.tokens))
        final = self.peaks.final.split([len(state.final) for state in self.states])
        return [defect(Peaks(*row)) for row in zip(aux, final, strict=True)]


class Landing:
    """Copies batches on a stream for copies alone, rounded on the device `rounding` before if that is given.

    No more than one batch is on its way when the next comes: that bounds the device's memory.
    """

    def __init__(self, rounding: torch.device | None = None) -> None:
        self._rounding = rounding
        self._before: torch.cuda.Event | None = None

    def land(self, states: Sequence[RowStates], whole: int | None = None) -> Landed:
        """Send the `states` of the rows of a batch on their way, one copy for each kind of them. They may go when this returns.

        Of those that are rounded the aux states of row `whole` come as they are too.
        """
        tokens, teachers = [len(state.aux) for state in states], [len(state.final) for state in states]
        plain, left = end_to_end(states), tokens
        if self._rounding is None:
            tensors = (*plain, *map(largest, plain[:2]))
        else:
            left = [count if number == whole else 0 for number, count in enumerate(tokens)]
            start = sum(tokens[:whole])
            aux, final, argmax = on(self._rounding, plain)
            (bits, scales, peaks), (even, final_peaks) = rounded_aux(aux), rounded_final(final)
            tensors = (aux[start : start + sum(left)], final, argmax, peaks, final_peaks, bits, scales, even)
        copies, arrived = self._copied(tensors)
        aux, final, argmax, *peaks_of_all = copies[:PLAIN]
        parts = zip(aux.split(left), final.split(teachers), argmax.split(teachers), strict=True)
        rounded = rounded_rows(copies[PLAIN:], tokens, teachers)
        return Landed(tokens, [RowStates(*row) for row in parts], rounded, Peaks(*peaks_of_all), arrived)

    def _copied(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], torch.cuda.Event | None]:
        """Copies of `tensors` on their way; those of the batch before are there."""
        if tensors[0].device.type != "cuda":
            return fetching(tensors)
        copies, arrived = self._beside(tensors, tensors[0].device)
        if self._before is not None:
            self._before.synchronize()
        self._before = arrived
        return copies, arrived

    def _beside(self, tensors: Sequence[Tensor], device: torch.device) -> tuple[tuple[Tensor, ...], torch.cuda.Event | None]:
        """Copy once the work that is queued so far is done, beside that which comes."""
        stream = copying(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            copies, arrived = fetching(tensors)
        for tensor in tensors:
            tensor.record_stream(stream)  # its memory is not given away before the copy
        return copies, arrived


@functools.cache
def copying(device: torch.device) -> torch.cuda.Stream:
    """The stream of copies from `device`. One for all: torch has 32 streams, and gives them out again, also those that batches run on."""
    return torch.cuda.Stream(device)


def end_to_end(states: Sequence[RowStates]) -> tuple[Tensor, Tensor, Tensor]:
    """`aux` bf16 [T, 3, H], `final` bf16 [F, H] and `argmax` [F] of all rows of `states`."""
    parts = ([getattr(state, name) for state in states] for name in ("aux", "final", "argmax"))
    aux, final, argmax = (own[0] if len(own) == 1 else torch.cat(own) for own in parts)
    return aux.to(torch.bfloat16), final.to(torch.bfloat16), argmax


def on(device: torch.device, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """`tensors` where the engine's lie: only those of states that were known have to go there."""
    return tensors if tensors[0].device.type == device.type else [sent(tensor, device) for tensor in tensors]


def rounded_rows(rounded: Sequence[Tensor], tokens: Sequence[int], teachers: Sequence[int]) -> list[Rounded]:
    """The rows, of so many `tokens` and `teachers`, of the bits of `rounded` aux states, their scales and final states; none of nothing."""
    if not rounded:
        return []
    bits, scales, final = rounded
    parts = zip(bits.view(FP8).split(list(tokens)), scales.split(list(tokens)), final.split(list(teachers)), strict=True)
    return [Rounded(*row) for row in parts]
