"""Ranks that a launcher such as torchrun has started, on one machine or on several that share the results' file system.

The launcher says in the environment which rank each process is. The first one is the stage: it reads the command line, locks the work
folder and publishes. The others wait for what it hands them, and end with it when there is nothing to do.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scripts.lib.ground.stage import Job, guarded
from scripts.lib.training.ranks import PATIENCE

Work = Callable[[Job, Path, str], Any]


def launched() -> bool:
    """Whether a launcher has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@contextlib.contextmanager
def leading(work: Work) -> Iterator[bool]:
    """Whether this process is the stage. Another rank does its part of `work(job, folder, device)` instead, and then ends.

    Where the first rank ends without work, as its results are there already, the others are sent home.
    """
    if not launched():
        yield True
    elif int(os.environ["RANK"]) > 0:
        logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s rank {os.environ['RANK']}: %(message)s", datefmt="%H:%M:%S")
        guarded(f"train/rank {os.environ['RANK']}", lambda: follow(work))
        yield False
    else:
        yield True
        if not dist.is_initialized():
            handed_out(None)
        dist.destroy_process_group()


def lead(work: Work, job: Job, folder: Path) -> Any:
    """What `work` gives on the first rank, while all others do theirs."""
    handed_out((job, folder))
    return work(job, folder, own_device(job))


def follow(work: Work) -> None:
    """Do the part of this rank in what the first one hands out."""
    task = handed_out(None)
    if task:
        job, folder = task
        work(job, folder, own_device(job))
    dist.destroy_process_group()


def handed_out(task: tuple[Job, Path] | None) -> tuple[Job, Path] | None:
    """Meet all ranks; the `task` of the first one."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=PATIENCE)
    box = [task]
    dist.broadcast_object_list(box, 0, device=torch.device("cpu"))
    return box[0]


def own_device(job: Job) -> str:
    """The GPU of this rank on its machine, or the CPU."""
    if not job.runtime["device"].startswith("cuda"):
        return "cpu"
    device = f"cuda:{os.environ['LOCAL_RANK']}"
    torch.cuda.set_device(device)
    return device
