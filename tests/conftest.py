"""One finished toy run a session, shared by the tests on the plan and on the whole pipeline."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.toy import make_toy, snakemake

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy working directory in which every target is up to date."""
    directory = make_toy(tmp_path_factory.mktemp("toy") / "work")
    snakemake(directory)
    return directory


@pytest.fixture
def workdir(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished toy run that a test may change; file times are kept, data paths still point to the original."""
    return shutil.copytree(finished, tmp_path / "work", symlinks=True)
