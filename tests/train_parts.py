"""Fixtures of the tests of stage `train`: `pytest_plugins = ["tests.train_parts"]`. Tests must leave both folders as they are."""

from pathlib import Path

import pytest
import torch

from scripts.lib.ground.stage import run
from scripts.lib.training.build import train
from tests.train_case import job, make_case


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What stage `train` reads, of a tiny target."""
    root = tmp_path_factory.mktemp("case")
    make_case(root)
    return root


@pytest.fixture(scope="module")
def trained(case: Path) -> Path:
    """The folder of an uninterrupted run."""
    torch.set_num_threads(1)
    run(job(case, case / "once" / "eagle3"), train)
    return case / "once" / "eagle3"
