"""How far a batch's gradients in bfloat16 and with products in 8 bits are from those in float32, for a drafter that a run has trained.

Real rows of the run's states in one packed batch, with the plain kernels of a CPU or the compiled ones of a GPU. A table of each weight's
distance as a share of the gradient in float32; the last line is JSON. Run: python -m benchmarks.train_precision --run results/demo
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.lib.eagle3.export import load_drafter
from scripts.lib.ground.manifest import NAME, read_manifest
from scripts.lib.ground.stage import Job
from scripts.lib.training.batches import TrainingRow
from scripts.lib.training.inputs import draft_head, read_inputs
from scripts.lib.training.loss import Teacher
from scripts.lib.training.objectives import soft_cross_entropy_
from scripts.lib.training.packed import Capacity, collate_packed
from scripts.lib.training.packed_step import PackedStep
from scripts.lib.training.settings import TrainSettings
from scripts.lib.training.stepping import Recipe

DECAY = 0.8
Gradients = tuple[Tensor, dict[str, Tensor]]


def main() -> None:
    """Measure, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_precision", description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("results/demo"), help="folder of a finished run")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    for name, default, text in (("rows", 10, "of the batch"), ("ttt", 4, "draft steps"), ("threads", 1, "of the CPU")):
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    path = next(options.run.glob("drafters/*/manifest.json"))
    settings = read_manifest(path, "train").settings
    inputs = {name: (options.run / name / NAME,) for name in ("hidden", "vocab", "target")}
    read = read_inputs(Job("train", path.parent, inputs, settings, {}, path.parent), TrainSettings.of(settings))
    rows, teacher = read.train.rows[: options.rows], Teacher(read.target.embedding(), draft_head(read))
    found: dict[str, Gradients] = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("fp8", torch.bfloat16)):
        recipe = Recipe(dtype, options.device, DECAY, 1.0, soft_cross_entropy_, fp8=name == "fp8")
        found[name] = gradients(path.parent, teacher, rows, recipe, options.ttt)
    figures = {name: compared(found[name], found["float32"]) for name in ("bfloat16", "fp8")}
    for name in figures["fp8"]["gradients"]:
        print(f"{name:40}" + "".join(f"  {kind} {of['gradients'][name]:.3f}" for kind, of in figures.items()))
    slots = sum(len(row.slots) for row in rows)
    print(json.dumps({"run": str(options.run), "device": options.device, "trained_tokens": slots, **figures}))


def gradients(folder: Path, teacher: Teacher, rows: Sequence[TrainingRow], recipe: Recipe, steps: int) -> Gradients:
    """Summed losses f32[K] of `rows` in one batch, and the gradient of each matrix of the drafter in `folder`."""
    drafter, capacity = load_drafter(folder, torch.float32, "cpu").requires_grad_(True), Capacity.of(rows)
    step = PackedStep(drafter, teacher, recipe, capacity)
    batch = collate_packed(rows, capacity, recipe.dtype).to(recipe.device)
    weights = torch.tensor([DECAY**number / int((batch.remaining > number).sum()) for number in range(steps)], device=recipe.device)
    losses = step.gradients(batch, weights)
    masters = step.weights.masters.named_parameters()
    return losses, {name: weight.grad.cpu() for name, weight in masters if weight.grad is not None and weight.dim() > 1}


def compared(found: Gradients, exact: Gradients) -> dict[str, Any]:
    """By how much losses and gradients are off, as shares of the `exact` ones."""
    (losses, near), (wanted, far) = found, exact
    away = {name: round(float((near[name] - gradient).norm() / gradient.norm()), 4) for name, gradient in far.items()}
    return {"losses": [round(float(share), 5) for share in (losses - wanted) / wanted], "gradients": away}


if __name__ == "__main__":
    main()
