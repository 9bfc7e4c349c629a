"""Stage `train`: one drafter from hidden states, in the folder that engines load."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.lib.eagle3.export import load_drafter, save_drafter
from scripts.lib.ground.files import write_json
from scripts.lib.ground.manifest import Counts, Manifest, Shard
from scripts.lib.ground.stage import Job, Result
from scripts.lib.training.curves import write_curves
from scripts.lib.training.inputs import Inputs, draft_head, new_drafter, read_inputs
from scripts.lib.training.loss import Teacher
from scripts.lib.training.settings import TrainSettings
from scripts.lib.training.trainer import Trainer


def train(job: Job, folder: Path) -> Result:
    """Train one drafter on the train rows, measure it on the held-out rows, export the last weights."""
    torch.set_num_threads(job.runtime["threads"])
    settings = TrainSettings.of(job.settings)
    inputs = read_inputs(job)
    drafter, warm = new_drafter(inputs, settings)
    teacher = Teacher(inputs.target.embedding(), draft_head(inputs))
    trainer = Trainer(drafter, teacher, inputs.train.rows, settings, job.runtime["device"])
    state = trainer.run(inputs.heldout.rows, folder)
    save_drafter(drafter, folder)
    load_drafter(folder, torch.float32, "cpu")
    write_curves(folder / "curves.csv", state.curve)
    figures = summary(state.curve, inputs, warm, trainer.evaluate(inputs.heldout.rows))
    write_json(folder / "training.json", figures)
    tokens = sum(row["trained_tokens"] for row in state.curve)
    return Result(manifest(job, folder, inputs, figures), {"trained_tokens": tokens})


def summary(curve: Sequence[dict[str, Any]], inputs: Inputs, warm: Sequence[str], final: dict[str, Any]) -> dict[str, Any]:
    """What `training.json` says: the work done, the final figures on the held-out rows, and the step that was best on them."""
    evaluated = [row for row in curve if row.get("eval_accept_length_all") is not None]
    best = max(evaluated, key=lambda row: row["eval_accept_length_all"])
    return {
        "steps": len(curve),
        "train_rows": len(inputs.train.rows),
        "heldout_rows": len(inputs.heldout.rows),
        "trained_tokens_per_epoch": sum(len(row.slots) for row in inputs.train.rows),
        "boundaries": list(inputs.boundaries),
        "warm_start": list(warm),
        "final": final,
        "best": {"step": best["step"], "accept_length_all": best["eval_accept_length_all"]},
    }


def manifest(job: Job, folder: Path, inputs: Inputs, figures: dict[str, Any]) -> Manifest:
    """The manifest: rows without a trained position are rejected, all others are used."""
    rows, untrained = inputs.train.rows + inputs.heldout.rows, inputs.train.untrained + inputs.heldout.untrained
    return Manifest(
        stage=job.stage,
        settings=job.settings,
        inputs=job.input_digests(),
        counts=Counts(len(rows) + untrained, len(rows), {"no trained position": untrained} if untrained else {}),
        shards=[Shard.of(folder / "model.safetensors", len(inputs.train.rows), figures["trained_tokens_per_epoch"])],
        facts={name: figures[name] for name in ("boundaries", "final", "best", "steps")},
    )
