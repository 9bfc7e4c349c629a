"""Packed batches made ahead of their use. For a GPU, threads put rows into page-locked memory as they are stored, a stream of its own
copies the batch, and the GPU decodes it; otherwise threads decode.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from scripts.lib.ground.ahead import ahead
from scripts.lib.training.batches import TrainingRow
from scripts.lib.training.packed import Capacity, FactoredBatch, PackedBatch, collate_factored, collate_packed

AHEAD = 3  # batches in the making, of which one may meet rows that the page cache has lost
QUEUED = 2  # batches on a GPU beside that which comes: it works on one, and the next is there when it ends


def packed_batches(runs: Sequence[Iterable[TrainingRow]], capacity: Capacity, dtype: torch.dtype, device: str) -> Iterator[PackedBatch]:
    """A batch on `device` for each of `runs`, in order; the next ones are made while one is used."""
    with ThreadPoolExecutor(torch.get_num_threads()) as readers, ThreadPoolExecutor(AHEAD) as pool:
        if torch.device(device).type == "cuda":
            made = ahead(pool, lambda rows: collate_factored(list(rows), capacity, dtype, readers.map), runs, AHEAD)
            yield from map(CudaMover(device), made)
        else:
            yield from ahead(pool, lambda rows: collate_packed(list(rows), capacity, dtype, readers.map), runs, AHEAD)


class CudaMover:
    """Copies batches to the device on a stream of its own, so that the copy runs beside the kernels of the batch before.

    The host waits until what used the batch before the last two is done: it queues faster than a GPU works, and each batch takes memory.
    """

    def __init__(self, device: str) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.asked: deque[torch.cuda.Event] = deque()

    def __call__(self, batch: FactoredBatch) -> PackedBatch:
        """`batch` on the device, decoded; the current stream waits for it, the host does not."""
        current = torch.cuda.current_stream(self.device)
        self.asked.append(torch.cuda.Event(blocking=True))
        self.asked[-1].record(current)
        if len(self.asked) > QUEUED:
            self.asked.popleft().synchronize()
        with torch.cuda.stream(self.stream):
            copied = batch.to(self.device)
        current.wait_stream(self.stream)
        for tensor in copied.tensors().values():
            tensor.record_stream(current)
        return copied
