"""Processes that train together: what they share, and that they end with the one that started them."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

from scripts.lib.ground.stage import Job
from scripts.lib.training.packing import split
from scripts.lib.training.ranks import together

SECONDS = 60


def stuck(job: Job, folder: Path, device: str) -> None:
    """The first rank says that all have met, and then all wait as for a rank that never comes."""
    (folder / str(os.getpid())).touch()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    time.sleep(SECONDS)


def start(folder: Path) -> None:
    together(stuck, Job("train", folder, {}, {}, {"device": "cpu"}), folder, 2)


def until(true) -> bool:
    end = time.monotonic() + SECONDS
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(true())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ranks_end_with_the_stage_even_when_it_is_killed(tmp_path):
    parent = multiprocessing.get_context("fork").Process(target=start, args=(tmp_path,))
    parent.start()
    assert until(lambda: len(list(tmp_path.iterdir())) == 2)
    ranks = [int(path.name) for path in tmp_path.iterdir()]
    assert all(alive(pid) for pid in ranks)
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    assert until(lambda: not any(alive(pid) for pid in ranks))


def test_every_rank_gets_a_batch_of_every_step_where_there_are_rows():
    sizes = [(5, 7), (9, 9), (3, 4), (7, 9), (6, 6)]
    one, two, four = (split(sizes, range(5), 15, multiple) for multiple in (1, 2, 4))
    assert [len(batches) for batches in (one, two, four)] == [2, 2, 4]
    assert all(sorted(index for batch in batches for index in batch) == list(range(5)) for batches in (one, two, four))
    assert split(sizes, [2], 15, 2) == [[2], []]
