"""Checkpoints: weights, optimizer, step and the curve so far, in one file that is whole or not there.

Training draws no random numbers once it runs (the order of rows is a function of seed and epoch), so there is no generator to store.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.lib.ground.files import whole_file
from scripts.lib.training import ranks
from scripts.lib.training.masters import DrafterWeights

NAME = "checkpoint.pt"


@dataclass
class State:
    """Where training stands: `step` steps are done, `curve` holds one row for each."""

    weights: DrafterWeights
    step: int
    curve: list[dict[str, Any]]


def has_state(folder: Path) -> bool:
    """Whether there is a checkpoint in `folder`."""
    return (folder / NAME).exists()


def save_state(folder: Path, state: State) -> None:
    """Let the first rank write `state` to `folder`, whole or not at all. It says nothing of how many ranks there are."""
    content = {**state.weights.state(), "step": state.step, "curve": state.curve}
    if not ranks.first():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / NAME) as file:
        torch.save(content, file)


def restore(folder: Path, state: State) -> None:
    """Bring `state` to where the checkpoint in `folder` stands; leave it at the start when there is none."""
    path = folder / NAME
    if path.exists():
        content = torch.load(path, map_location="cpu", weights_only=True)
        state.weights.load(content)
        state.step, state.curve = content["step"], content["curve"]
