"""Checkpoints: weights, optimizer, step and the curve so far, in one file that is whole or not there.

Training draws no random numbers once it runs (the order of rows is a function of seed and epoch), so there is no generator to store.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

NAME = "checkpoint.pt"


@dataclass
class State:
    """Where training stands: `step` steps are done, `curve` holds one row for each."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int
    curve: list[dict[str, Any]]


def save_state(folder: Path, state: State) -> None:
    """Write `state` to `folder`: a temporary name, fsync, rename."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{NAME}.part"
    content = {
        "model": state.model.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "step": state.step,
        "curve": state.curve,
    }
    with temporary.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / NAME)


def restore(folder: Path, state: State) -> None:
    """Bring `state` to where the checkpoint in `folder` stands; leave it at the start when there is none."""
    path = folder / NAME
    if path.exists():
        device = next(state.model.parameters()).device
        content = torch.load(path, map_location=device, weights_only=True)
        state.model.load_state_dict(content["model"])
        state.optimizer.load_state_dict(content["optimizer"])
        state.step, state.curve = content["step"], content["curve"]
