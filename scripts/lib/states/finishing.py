"""Shards are read and finished by a few threads beside the forward passes of others: a GPU never waits for rows, checks, CPU or disk."""

import contextlib
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from scripts.lib.ground.ahead import ahead
from scripts.lib.states.rows import ShardPlan
from scripts.lib.states.writer import Receipt, ShardWriter

WORKERS = 3  # as many shards wait in memory beside the one that is being captured, where the disk is slower than the engine
SWITCH_SECONDS = 1e-4  # about what a GPU takes for one operation of a large batch


def workers(device: str) -> int:
    """Threads that finish shards beside an engine on `device`; a CPU has no core to spare."""
    return 0 if torch.device(device).type == "cpu" else WORKERS


def written(writer: ShardWriter, plans: Sequence[ShardPlan], count: int) -> Iterator[tuple[ShardPlan, Receipt]]:
    """Make the shards `plans`, in their order, with `count` finishing threads; with none each is finished before the next begins.

    Equal files come out whatever the count. What stops a shard is raised in its turn, when those that are being finished are done:
    they stay. What a kill loses is in memory: up to `count` + 1 shards.
    """
    if not count:
        for plan in plans:
            yield plan, writer.write(plan)
        return
    with switching_often(), ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(count, thread_name_prefix="finish") as pool:
        pending: deque[tuple[ShardPlan, Future[Receipt]]] = deque()
        for plan, rows in zip(plans, ahead(reader, lambda plan: plan.read(), plans, 1), strict=True):
            pending.append((plan, pool.submit(writer.finish, plan, writer.capture(rows))))
            while pending and (len(pending) > count or pending[0][1].done()):
                yield ended(pending)
        while pending:
            yield ended(pending)


@contextlib.contextmanager
def switching_often() -> Iterator[None]:
    """Let threads take turns quickly in Python: a pass queues thousands of operations, and has to get its turn back after each."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def ended(pending: deque[tuple[ShardPlan, "Future[Receipt]"]]) -> tuple[ShardPlan, Receipt]:
    """The first of the `pending` shards, once it is finished."""
    plan, finished = pending.popleft()
    return plan, finished.result()
