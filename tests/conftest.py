"""One finished toy run a session, shared by the tests on the plan and on the whole pipeline."""

import fcntl
import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.toy import make_toy, snakemake

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy working directory in which every target is up to date; processes of one session share it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (shared / "toy.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = shared / "toy.done"
        if not done.exists():
            snakemake(make_toy(shared / "toy" / "work"))
            done.touch()
    return shared / "toy" / "work"


@pytest.fixture
def workdir(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished toy run that a test may change; file times are kept, data paths still point to the original."""
    return shutil.copytree(finished, tmp_path / "work", symlinks=True)
