"""Packed batches made ahead of their use: a thread puts rows into page-locked memory, several decode what is stored in fewer bytes, and a
stream of its own copies the batch.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from scripts.lib.training.batches import TrainingRow
from scripts.lib.training.packed import Capacity, PackedBatch, collate_packed

AHEAD = 2


def packed_batches(runs: Sequence[Iterable[TrainingRow]], capacity: Capacity, dtype: torch.dtype, device: str) -> Iterator[PackedBatch]:
    """A batch on `device` for each of `runs`, in order; the next ones are made while one is used."""
    on_cuda = torch.device(device).type == "cuda"
    moved = CudaMover(device) if on_cuda else lambda batch: batch

    def make(rows: Iterable[TrainingRow]) -> PackedBatch:
        return collate_packed(list(rows), capacity, dtype, on_cuda, readers.map)

    with ThreadPoolExecutor(torch.get_num_threads()) as readers, ThreadPoolExecutor(1) as pool:
        yield from ahead(pool, make, moved, runs)


def ahead(
    pool: ThreadPoolExecutor,
    make: Callable[[Iterable[TrainingRow]], PackedBatch],
    moved: Callable[[PackedBatch], PackedBatch],
    runs: Sequence[Iterable[TrainingRow]],
) -> Iterator[PackedBatch]:
    """`moved(make(run))` for each of `runs`; up to `AHEAD` are in the making."""
    waiting = [pool.submit(make, rows) for rows in runs[:AHEAD]]
    for place in range(len(runs)):
        batch = waiting.pop(0).result()
        if place + AHEAD < len(runs):
            waiting.append(pool.submit(make, runs[place + AHEAD]))
        yield moved(batch)


class CudaMover:
    """Copies batches to the device on a stream of its own, so that the copy runs beside the kernels of the batch before."""

    def __init__(self, device: str) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def __call__(self, batch: PackedBatch) -> PackedBatch:
        """`batch` on the device; the current stream waits for it, the host does not."""
        with torch.cuda.stream(self.stream):
            copied = batch.to(self.device)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        for tensor in vars(copied).values():
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(current)
        return copied
