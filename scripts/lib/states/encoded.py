"""States that take fewer bytes: byte planes, fp8, and reading them row by row.

A bfloat16 has 8 bits of exponent and 8 of sign and fraction. Exponents of one layer differ little, so that zstd's entropy coder brings
them to about 2.7 bits; signs and fractions are noise and stay as they are, in a plane of the mapped file. An e4m3 state is one plane.
Of the multiples of a grid the lowest four bits are noise, the next eight tell much, the four above are nearly always nought.

Shapes: N states of a shard (tokens, or final states), L layers (1 for final states), H hidden size, n states of one row.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow
import torch
from torch import Tensor

from scripts.lib.states.rounding import FP8, dequantised, off_grid, on_grid, quantised
from scripts.lib.states.storing import Storing

LEVEL = 1  # higher levels find chance repetitions, which cost more than the entropy coder gains
BLOCK = 2**17  # numbers that are decoded at a time: they stay in the cache
SIGN_AND_FRACTION = -0x7F81  # of a fraction plane whose sign was extended: bits 7 to 14 go
CENTRE = 2**11  # added to multiples of a grid: those nearer to nought have no bit above the lowest twelve
LOWEST = 0x0F
HIGH_PLANES = 2  # of multiples of a grid


def planes(states: Tensor) -> tuple[Tensor, Tensor]:
    """Exponents, and signs with fractions, of bf16 `states`, both u8 of their shape."""
    bits = states.view(torch.int16)
    return (bits >> 7).to(torch.uint8), ((bits & 0x7F) | ((bits >> 8) & 0x80)).to(torch.uint8)


def joined(exponents: Tensor, fractions: Tensor) -> Tensor:
    """The bf16 states [n, …] of two `planes`, in numpy: its loops stay in the calling thread, so that threads can each decode a row."""
    result = np.empty(exponents.shape, np.int16)
    signed, high = fractions.numpy().view(np.int8), exponents.numpy()
    step = max(BLOCK // max(high[0].size, 1), 1) if len(high) else 1
    for start in range(0, len(high), step):
        block = slice(start, start + step)
        low = signed[block].astype(np.int16)
        low &= SIGN_AND_FRACTION
        np.left_shift(high[block], 7, out=result[block], dtype=np.int16)
        result[block] |= low
    return torch.from_numpy(result).view(torch.bfloat16)


def split_multiples(multiples: Tensor) -> tuple[Tensor, Tensor]:
    """Planes u8 [N, 2, H] of the upper bits of `multiples` i16 [N, H] of a grid, and u8 [N, H / 2] of their lowest four, two in a byte."""
    centred = multiples + CENTRE
    lowest = (centred & LOWEST).to(torch.uint8)
    half = lowest.shape[1] // 2
    upper = torch.stack([centred >> 4 & 0xFF, centred >> 12 & LOWEST], 1).to(torch.uint8)
    return upper, lowest[:, :half] | lowest[:, half:] << 4


def joined_multiples(upper: Tensor, lowest: Tensor) -> Tensor:
    """The multiples i16 [n, H] of two `split_multiples`, in numpy for the sake of `joined`."""
    middle, top = upper.numpy().transpose(1, 0, 2)
    pairs, half = lowest.numpy(), lowest.shape[1]
    result = np.empty((len(pairs), 2 * half), np.int16)
    result[:, :half], result[:, half:] = pairs & LOWEST, pairs >> 4
    result |= np.left_shift(middle, 4, dtype=np.int16)
    if top.any():
        result |= np.left_shift(top, 12, dtype=np.int16)
    result -= CENTRE
    return torch.from_numpy(result)


def compressed(plane: Tensor, borders: Sequence[int]) -> dict[str, Tensor]:
    """`plane` u8 [N, L, H] as `frames` u8 [bytes], one for each stretch of states between `borders`, and their `offsets` i64 [R + 1].

    A frame holds one layer after the other, since layers differ in scale. Frames are made in as many threads as torch has.
    """

    def frame(border: tuple[int, int]) -> bytes:
        by_layer = plane[border[0] : border[1]].transpose(0, 1).contiguous().numpy()
        return pyarrow.Codec("zstd", compression_level=LEVEL).compress(by_layer, asbytes=True)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        frames = list(pool.map(frame, pairwise(borders)))
    lengths = torch.tensor([0, *map(len, frames)], dtype=torch.int64)
    return {"frames": torch.frombuffer(bytearray(b"".join(frames)), dtype=torch.uint8), "offsets": lengths.cumsum(0)}


def encoded(name: str, states: Tensor, borders: Sequence[int], storing: Storing) -> dict[str, Tensor]:
    """The tensors that hold `states` bf16 [N, L, H] or [N, H], called `name`, in a shard. `borders` cut them into rows.

    Equal states give equal bytes with equal versions of pyarrow, whose zstd it is.
    """
    if storing.dtype == "bfloat16":
        parts = exact(states, borders, storing)
    else:
        parts = (e4m3 if states.dim() == 3 else gridded)(states, borders, storing)
    return {f"{name}.{part}" if part else name: tensor for part, tensor in parts.items()}


def exact(states: Tensor, borders: Sequence[int], storing: Storing) -> dict[str, Tensor]:
    """Every bit of `states` bf16 [N, L, H] or [N, H]."""
    if storing.compression == "none":
        return {"": states}
    exponents, fractions = planes(states)
    return {"fractions": fractions, **compressed(exponents if states.dim() == 3 else exponents[:, None], borders)}


def e4m3(states: Tensor, borders: Sequence[int], storing: Storing) -> dict[str, Tensor]:
    """`states` bf16 [N, L, H] in e4m3."""
    values, scales = quantised(states)
    if storing.compression == "none":
        return {"": values, "scales": scales}
    return {"scales": scales, "shape": torch.tensor(values.shape), **compressed(values.view(torch.uint8), borders)}


def gridded(states: Tensor, borders: Sequence[int], storing: Storing) -> dict[str, Tensor]:
    """`states` bf16 [N, H] on a grid, which makes them compress: without compression they are bfloat16 numbers as before."""
    multiples, steps = on_grid(states)
    if storing.compression == "none":
        return {"": off_grid(multiples, steps)}
    upper, lowest = split_multiples(multiples)
    return {"steps": steps, "lowest": lowest, **compressed(upper, borders)}


@dataclass(frozen=True)
class Factored:
    """States as `numbers` [n, …], bf16, e4m3 or i16, times `factors` f32 [n] or [n, L]; there are none where numbers are bf16.

    It is a small product that is left to do, and half the bytes that a GPU that does it must be sent.
    """

    numbers: Tensor
    factors: Tensor | None

    def on_host(self) -> Tensor:
        """The states, bf16, on a CPU: in the calling thread alone, so that threads can each decode a row."""
        if self.factors is None:
            return self.numbers
        return (dequantised if self.numbers.dtype == FP8 else off_grid)(self.numbers, self.factors)

    def product(self) -> Tensor:
        """The same on any device."""
        return self.numbers if self.factors is None else (self.numbers.float() * self.factors[..., None]).to(torch.bfloat16)


def joined_factored(parts: Sequence[Factored]) -> Factored:
    """`parts` of one encoding, end to end."""
    if len(parts) == 1:
        return parts[0]
    factors = [part.factors for part in parts if part.factors is not None]
    kind = parts[0].numbers.dtype
    numbers = torch.cat([as_bits(part.numbers) for part in parts]).view(kind)
    return Factored(numbers, torch.cat(factors) if factors else None)


def as_bits(numbers: Tensor) -> Tensor:
    """`numbers` as integers of their size: torch moves few kinds of eight bits."""
    return numbers.view(torch.uint8) if numbers.element_size() == 1 else numbers.view(torch.int16)


@dataclass(frozen=True)
class Encoding:
    """How the states of one name lie in a shard: views of the mapped file, cut into rows at `borders`. Absent parts are None."""

    shape: tuple[int, ...]
    borders: Sequence[int]
    values: Tensor | None
    scales: Tensor | None
    fractions: Tensor | None
    steps: Tensor | None
    lowest: Tensor | None
    frames: Tensor | None
    offsets: Sequence[int]

    def row(self, number: int) -> Factored:
        """Row `number`, which is in frames."""
        row = slice(self.borders[number], self.borders[number + 1])
        if self.scales is not None:
            return Factored(self.frame(number, self.shape[1]).view(FP8), self.scales[row])
        if self.steps is not None:
            assert self.lowest is not None
            return Factored(joined_multiples(self.frame(number, HIGH_PLANES), self.lowest[row]), self.steps[row])
        assert self.fractions is not None
        exponents = self.frame(number, self.shape[1] if len(self.shape) == 3 else 1)
        return Factored(joined(exponents.view(-1, *self.shape[1:]), self.fractions[row]), None)

    def stretch(self, first: int, last: int) -> Factored:
        """States `first` to `last - 1`: views of the mapped file, or what the frames of their rows hold, and of no other."""
        if self.values is not None:
            assert self.scales is not None
            return Factored(self.values[first:last], self.scales[first:last])
        low, high = bisect_right(self.borders, first) - 1, bisect_left(self.borders, last)
        whole = joined_factored([self.row(number) for number in range(low, high)])
        part = slice(first - self.borders[low], last - self.borders[low])
        return Factored(whole.numbers[part], None if whole.factors is None else whole.factors[part])

    def frame(self, number: int, layers: int) -> Tensor:
        """u8 [n, `layers`, H] of the frame of row `number`."""
        assert self.frames is not None
        count = self.borders[number + 1] - self.borders[number]
        frame = self.frames.numpy()[self.offsets[number] : self.offsets[number + 1]]
        plain = pyarrow.Codec("zstd").decompress(pyarrow.py_buffer(frame), decompressed_size=count * layers * self.shape[-1])
        by_layer = np.frombuffer(plain, np.uint8).reshape(layers, count, self.shape[-1])
        return torch.from_numpy(by_layer.transpose(1, 0, 2))


@dataclass(frozen=True)
class EncodedStates:
    """Some of the states of a shard, decoded each time that they are read: `first` to `last - 1`, and of those `chosen` if given."""

    encoding: Encoding
    first: int
    last: int
    chosen: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """As of a tensor."""
        count = self.last - self.first if self.chosen is None else len(self.chosen)
        return count, *self.encoding.shape[1:]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, places: slice | Tensor) -> "EncodedStates":
        """The states at `places` (a range, or ascending i64) of these, still encoded."""
        assert self.chosen is None
        if isinstance(places, slice):
            start, stop, _ = places.indices(len(self))
            return EncodedStates(self.encoding, self.first + start, self.first + stop)
        if not len(places):
            return EncodedStates(self.encoding, self.first, self.first)
        start, stop = int(places[0]), int(places[-1]) + 1
        return EncodedStates(self.encoding, self.first + start, self.first + stop, places - start)

    def factored(self) -> Factored:
        """These states but for a product."""
        if self.first >= self.last:
            return Factored(torch.empty(self.shape, dtype=torch.bfloat16), None)
        found = self.encoding.stretch(self.first, self.last)
        if self.chosen is None:
            return found
        numbers = as_bits(found.numbers)[self.chosen].view(found.numbers.dtype)
        return Factored(numbers, None if found.factors is None else found.factors[self.chosen])


States = Tensor | EncodedStates


def factored(states: States) -> Factored:
    """`states` but for a product; those of a plain tensor are whole, and a view of the mapped file as they are."""
    return Factored(states, None) if isinstance(states, Tensor) else states.factored()


def decoded(states: States) -> Tensor:
    """`states` as a tensor bf16 [n, …]."""
    return factored(states).on_host()
