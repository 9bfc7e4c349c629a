"""Several processes that train one drafter, each on its own GPU and its own batches of every step; sums are taken over all of them.

What a step trains on and how the order runs do not depend on how many there are. Without a process group there is one.
"""

import datetime
import logging
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.stage import Job

T = TypeVar("T")
PATIENCE = datetime.timedelta(hours=2)  # of ranks that wait for one that compiles or reads


def count() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def number() -> int:
    """Which of the ranks this is, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def here() -> int:
    """How many of them are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", count()))


def first() -> bool:
    """Whether this is the rank that logs and writes files."""
    return not dist.is_initialized() or dist.get_rank() == 0


def mine(things: Sequence[T]) -> list[T]:
    """The share of this rank."""
    return list(things[dist.get_rank() :: count()]) if dist.is_initialized() else list(things)


def add_up(*tensors: Tensor) -> None:
    """Replace each of `tensors` by its sum over all ranks; all sums are under way at once."""
    if dist.is_initialized():
        for sum_ in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            sum_.wait()


def as_first(tensors: Sequence[Tensor]) -> None:
    """Replace `tensors` by those of the first rank."""
    if dist.is_initialized():
        for tensor in tensors:
            dist.broadcast(tensor, 0)


@dataclass(frozen=True)
class Task:
    """`work(job, folder, device)` for each of `ranks` processes, which meet in the folder `meeting`."""

    work: Callable[[Job, Path, str], Any]
    job: Job
    folder: Path
    ranks: int
    meeting: Path


def together(work: Callable[[Job, Path, str], Any], job: Job, folder: Path, ranks: int) -> Any:
    """Run `work(job, folder, device)` in `ranks` processes, each with its own device; what the first one returns.

    When one fails the others are ended; a StageError is raised here again. They end with this process, whatever ends it.
    """
    with tempfile.TemporaryDirectory() as meeting:
        task = Task(work, job, folder, ranks, Path(meeting))
        try:
            multiprocessing.spawn(one_rank, (task,), nprocs=ranks)
        except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
            refused = sorted(task.meeting.glob("refused-*"))
            if refused:
                raise StageError(refused[0].read_text()) from error
            raise
        return pickle.loads((task.meeting / "result").read_bytes())


def one_rank(rank: int, task: Task) -> None:
    """The life of one process. It is killed with the one that started it: no handler would run while it waits for other ranks."""
    multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # type: ignore[attr-defined]  # in no stub; `spawn` has set SIGINT
    level = logging.INFO if rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format=f"%(asctime)s rank {rank}: %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    on_cuda = task.job.runtime["device"].startswith("cuda")
    device, backend = (f"cuda:{rank}", "nccl") if on_cuda else ("cpu", "gloo")
    if on_cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, f"file://{task.meeting}/group", timeout=PATIENCE, rank=rank, world_size=task.ranks)
    try:
        result = task.work(task.job, task.folder, device)
    except StageError as error:
        (task.meeting / f"refused-{rank}").write_text(str(error))
        raise
    if rank == 0:
        (task.meeting / "result").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()
