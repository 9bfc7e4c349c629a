"""Stage `train`: one drafter from hidden states, in the folder that engines load."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from scripts.lib.eagle3.export import load_drafter
from scripts.lib.ground.files import write_json
from scripts.lib.ground.manifest import Counts, Manifest, Shard
from scripts.lib.ground.stage import Job, Result
from scripts.lib.sharing.leaving import make_room
from scripts.lib.training import ranks
from scripts.lib.training.checkpoints import has_state
from scripts.lib.training.curves import write_curves
from scripts.lib.training.feed import Feed, Stored
from scripts.lib.training.inputs import Inputs, draft_head, new_drafter, read_inputs
from scripts.lib.training.launched import launched, lead
from scripts.lib.training.loss import Teacher
from scripts.lib.training.ranks import together
from scripts.lib.training.rolling import FOLDER, Rolling, dumping, room_for
from scripts.lib.training.schedule import plan
from scripts.lib.training.settings import TrainSettings
from scripts.lib.training.trainer import GOAL, Trainer, best_of


def train(job: Job, folder: Path) -> Result:
    """Train one drafter on the train rows, measure it on the held-out rows, export the last weights."""
    make_room(job.runtime["device"])
    count = job.runtime.get("ranks", 1)
    with dumping(job, folder):
        if launched():
            found = lead(train_rank, job, folder)
        else:
            found = together(train_rank, job, folder, count) if count > 1 else train_rank(job, folder, job.runtime["device"])
    return cast(Result, found)


def train_rank(job: Job, folder: Path, device: str) -> Result | None:
    """The part of one rank on `device`; the first one writes the results and returns what they are."""
    torch.set_num_threads(max(job.runtime["threads"] // ranks.here(), 1))
    if torch.device(device).index is not None:
        torch.cuda.set_device(device)  # Triton and graphs work on the current one
    settings = TrainSettings.of(job.settings)
    inputs = read_inputs(job, settings)
    feed = open_feed(job, folder, inputs, settings)
    drafter, warm = new_drafter(inputs, settings, device, None if has_state(folder / "partial") else feed)
    teacher = Teacher(inputs.target.embedding(), draft_head(inputs))
    trainer = Trainer(drafter, teacher, (feed, inputs.heldout.rows), settings, settings.recipe(device, job.runtime))
    state = trainer.run(folder)
    figures = summary(state.curve, inputs, warm, trainer.evaluate())
    tokens = sum(row["trained_tokens"] for row in state.curve)
    trainer.save(folder)
    if ranks.first():
        load_drafter(folder, torch.float32, "cpu")
        write_curves(folder / "curves.csv", state.curve)
        write_json(folder / "training.json", figures)
        described = manifest(job, folder, inputs, figures, feed.quarantined())
        return Result(described, {"trained_tokens": tokens, "trained_tokens_per_second": trainer.speed.late_rate()})
    return None


def open_feed(job: Job, folder: Path, inputs: Inputs, settings: TrainSettings) -> Feed:
    """The rows to train on, on disk or on their way there."""
    if inputs.rolled is None:
        return Stored(inputs.train, settings)
    solved = settings.warm_start and not settings.start_from and not has_state(folder / "partial")
    feed = Rolling(folder / FOLDER, inputs.rolled, settings, inputs.train, solved)
    feed.begin(plan(inputs.train, settings), room_for(job, folder))
    return feed


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


def manifest(job: Job, folder: Path, inputs: Inputs, figures: dict[str, Any], quarantined: int) -> Manifest:
    """The manifest: rows without a trained position, outside the fraction, or `quarantined` for their states, are rejected."""
    weights = [path for path in (folder / "model.safetensors", folder / "best" / "model.safetensors") if path.exists()]
    used, untrained = len(inputs.train.rows) + len(inputs.heldout.rows) - quarantined, inputs.train.untrained + inputs.heldout.untrained
    rejected = {"no trained position": untrained, "outside the fraction": inputs.train.unused, "quarantined": quarantined}
    return Manifest(
        stage=job.stage,
        settings=job.settings,
        inputs=job.input_digests(),
        counts=Counts(used + sum(rejected.values()), used, {reason: count for reason, count in rejected.items() if count}),
        shards=[Shard.of(path, len(inputs.train.rows), figures["trained_tokens_per_epoch"], folder) for path in weights],
        facts={name: figures[name] for name in ("boundaries", "final", "best", "steps")},
    )
