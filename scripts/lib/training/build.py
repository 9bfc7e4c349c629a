"""Stage `train`: one drafter from hidden states, in the folder that engines load."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from scripts.lib.eagle3.export import load_drafter, save_drafter
from scripts.lib.ground.files import write_json
from scripts.lib.ground.manifest import Counts, Manifest, Shard
from scripts.lib.ground.stage import Job, Result
from scripts.lib.training import ranks
from scripts.lib.training.curves import write_curves
from scripts.lib.training.inputs import Inputs, draft_head, new_drafter, read_inputs
from scripts.lib.training.loss import Teacher
from scripts.lib.training.ranks import together
from scripts.lib.training.settings import TrainSettings
from scripts.lib.training.trainer import GOAL, Trainer, best_of


def train(job: Job, folder: Path) -> Result:
    """Train one drafter on the train rows, measure it on the held-out rows, export the last weights."""
    count = job.runtime.get("ranks", 1)
    found = together(train_rank, job, folder, count) if count > 1 else train_rank(job, folder, job.runtime["device"])
    return cast(Result, found)


def train_rank(job: Job, folder: Path, device: str) -> Result | None:
    """The part of one rank on `device`; the first one writes the results and returns what they are."""
    torch.set_num_threads(max(job.runtime["threads"] // ranks.count(), 1))
    settings = TrainSettings.of(job.settings)
    inputs = read_inputs(job)
    drafter, warm = new_drafter(inputs, settings, device)
    teacher = Teacher(inputs.target.embedding(), draft_head(inputs))
    trainer = Trainer(drafter, teacher, (inputs.train.rows, inputs.heldout.rows), settings, device)
    state = trainer.run(folder)
    figures = summary(state.curve, inputs, warm, trainer.evaluate())
    tokens = sum(row["trained_tokens"] for row in state.curve)
    if ranks.first():
        save_drafter(drafter, folder)
        load_drafter(folder, torch.float32, "cpu")
        write_curves(folder / "curves.csv", state.curve)
        write_json(folder / "training.json", figures)
        described = manifest(job, folder, inputs, figures)
        return Result(described, {"trained_tokens": tokens, "trained_tokens_per_second": trainer.speed.late_rate()})
    return None


def summary(curve: Sequence[dict[str, Any]], inputs: Inputs, warm: Sequence[str], final: dict[str, Any]) -> dict[str, Any]:
    """What `training.json` says: the work done, the final figures on the held-out rows, and the step that was best on them."""
    best = curve[best_of(curve)]
    return {
        "steps": len(curve),
        "train_rows": len(inputs.train.rows),
        "heldout_rows": len(inputs.heldout.rows),
        "trained_tokens_per_epoch": sum(len(row.slots) for row in inputs.train.rows),
        "boundaries": list(inputs.boundaries),
        "warm_start": list(warm),
        "final": final,
        "best": {"step": best["step"], "accept_length_all": best[GOAL]},
    }


def manifest(job: Job, folder: Path, inputs: Inputs, figures: dict[str, Any]) -> Manifest:
    """The manifest: rows without a trained position are rejected, all others are used."""
    weights = [path for path in (folder / "model.safetensors", folder / "best" / "model.safetensors") if path.exists()]
    rows, untrained = inputs.train.rows + inputs.heldout.rows, inputs.train.untrained + inputs.heldout.untrained
    return Manifest(
        stage=job.stage,
        settings=job.settings,
        inputs=job.input_digests(),
        counts=Counts(len(rows) + untrained, len(rows), {"no trained position": untrained} if untrained else {}),
        shards=[Shard.of(path, len(inputs.train.rows), figures["trained_tokens_per_epoch"], folder) for path in weights],
        facts={name: figures[name] for name in ("boundaries", "final", "best", "steps")},
    )
