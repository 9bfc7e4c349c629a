"""States that take fewer bytes: byte planes, fp8 with scales, and reading them row by row.

A bfloat16 has 8 bits of exponent and 8 of sign and fraction. Exponents of one layer differ little, so that zstd's entropy coder brings
them to about 2.7 bits; signs and fractions are noise and stay as they are, in a plane of the mapped file. An fp8 state is one plane.

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

from scripts.lib.states.storing import Storing

LEVEL = 1  # higher levels find chance repetitions, which cost more than the entropy coder gains
FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
BLOCK = 2**17  # numbers that are decoded at a time: they stay in the cache
SERIAL = 2**15 - 1  # the same for torch, which takes further threads for more: rows are decoded in several threads already
HALF_BITS = -0x4080  # of an e4m3 whose sign was extended: bit 14 goes
SIGN_AND_FRACTION = -0x7F81  # of a fraction plane whose sign was extended: bits 7 to 14 go


def quantised(states: Tensor) -> tuple[Tensor, Tensor]:
    """`states` bf16 [N, L, H] as e4m3 [N, L, H] and scales f32 [N, L].

    A scale per token and layer: the first tokens of a text are orders of magnitude larger than all others.
    """
    scales = states.abs().amax(-1).float() / LARGEST
    return (states.float() / scales[..., None]).to(FP8), scales


def dequantised(values: Tensor, scales: Tensor) -> Tensor:
    """bf16 [n, L, H] of e4m3 `values` [n, L, H] and `scales` f32 [n, L].

    The bits of an e4m3, moved to their places in a float16, are that of 2^-8 times its value: several times quicker than torch's
    conversion, a number at a time. The product is the same to the last bit, as powers of two are exact.
    """
    bits, result = values.view(torch.int8), torch.empty(values.shape, dtype=torch.bfloat16)
    step = max(SERIAL // max(values[0].numel(), 1), 1) if len(values) else 1
    for start in range(0, len(values), step):
        block = slice(start, start + step)
        halves = bits[block].to(torch.int16).bitwise_left_shift_(7).bitwise_and_(HALF_BITS).view(torch.float16)
        result[block] = halves.float().mul_(scales[block, ..., None] * 2**8)
    return result


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


def compressed(plane: Tensor, borders: Sequence[int]) -> tuple[Tensor, Tensor]:
    """`plane` u8 [N, L, H] as frames u8 [bytes], one for each stretch of states between `borders`, and their offsets i64 [R + 1].

    A frame holds one layer after the other, since layers differ in scale. Frames are made in as many threads as torch has.
    """

    def frame(border: tuple[int, int]) -> bytes:
        by_layer = plane[border[0] : border[1]].transpose(0, 1).contiguous().numpy()
        return pyarrow.Codec("zstd", compression_level=LEVEL).compress(by_layer, asbytes=True)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        frames = list(pool.map(frame, pairwise(borders)))
    lengths = torch.tensor([0, *map(len, frames)], dtype=torch.int64)
    return torch.frombuffer(bytearray(b"".join(frames)), dtype=torch.uint8), lengths.cumsum(0)


def encoded(name: str, states: Tensor, borders: Sequence[int], storing: Storing) -> dict[str, Tensor]:
    """The tensors that hold `states` bf16 [N, L, H] or [N, H], called `name`, in a shard. `borders` cut them into rows.

    Equal states give equal bytes with equal versions of pyarrow, whose zstd it is.
    """
    plain = states.contiguous()
    fp8 = storing.dtype == "fp8" and name == "aux"
    parts: dict[str, Tensor] = {}
    if fp8:
        plain, parts[f"{name}.scales"] = quantised(plain)
    if storing.compression == "none":
        return {name: plain, **parts}
    shape = plain.shape if plain.dim() == 3 else (len(plain), 1, plain.shape[1])
    if fp8:
        plane = plain.view(torch.uint8)
        parts[f"{name}.shape"] = torch.tensor(shape)
    else:
        plane, parts[f"{name}.fractions"] = planes(plain)
    parts[f"{name}.frames"], parts[f"{name}.offsets"] = compressed(plane.view(shape), borders)
    return parts


@dataclass(frozen=True)
class Encoding:
    """How the states of one name lie in a shard: views of the mapped file, cut into rows at `borders`. Absent parts are None."""

    shape: tuple[int, ...]
    borders: Sequence[int]
    scales: Tensor | None
    values: Tensor | None
    fractions: Tensor | None
    frames: Tensor | None
    offsets: Sequence[int]

    def row(self, number: int) -> Tensor:
        """bf16 [n, …] of row `number`."""
        start, end = self.borders[number], self.borders[number + 1]
        if self.frames is None:
            assert self.values is not None and self.scales is not None
            return dequantised(self.values[start:end], self.scales[start:end])
        layers = self.shape[1] if len(self.shape) == 3 else 1
        frame = self.frames[self.offsets[number] : self.offsets[number + 1]].numpy()
        size = (end - start) * layers * self.shape[-1]
        plain = pyarrow.Codec("zstd").decompress(pyarrow.py_buffer(frame), decompressed_size=size)
        plane = torch.from_numpy(np.frombuffer(plain, np.uint8)).view(layers, end - start, self.shape[-1]).transpose(0, 1)
        plane = plane if len(self.shape) == 3 else plane[:, 0]
        if self.scales is not None:
            return dequantised(plane, self.scales[start:end])
        assert self.fractions is not None
        return joined(plane, self.fractions[start:end])


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

    def read(self) -> Tensor:
        """bf16 [n, …]: decodes the rows in which these states lie, and no other."""
        borders = self.encoding.borders
        if self.first >= self.last:
            return torch.empty(self.shape, dtype=torch.bfloat16)
        low, high = bisect_right(borders, self.first) - 1, bisect_left(borders, self.last)
        rows = [self.encoding.row(number) for number in range(low, high)]
        whole = rows[0] if len(rows) == 1 else torch.cat(rows)
        part = whole[self.first - borders[low] : self.last - borders[low]]
        return part if self.chosen is None else part[self.chosen]


States = Tensor | EncodedStates


def decoded(states: States) -> Tensor:
    """`states` as a tensor; a plain one is a view of the mapped file as it is."""
    return states if isinstance(states, Tensor) else states.read()
