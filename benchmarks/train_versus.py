"""The same rows, the same number of passes: SpecForge's trainer and ours, each with its own recipe, exported for SGLang.

Reads the hidden states, the draft vocabulary and the target of a finished run and writes `ours/`, `specforge/` and `config.yaml` below
`--folder`. With that config the pipeline measures both drafters in SGLang on the run's benchmark tasks:

    python -m benchmarks.train_versus --run results/demo --folder results/versus --device cuda
    snakemake --configfile results/versus/config.yaml

SpecForge's package (specforge 0.2.0) must be importable, and Triton, which it imports on a CPU too. Its parts do what its trainer does
(`benchmarks.train_specforge`), with the settings of its recipes: learning rate 1e-4, 1.5 % warm-up, cosine, clipping at 0.5, rows in the
order of a seeded permutation. It trains the same slots as ours, the first of each answer among them, which its own mask leaves out. The
last line is JSON.
"""

import argparse
import json
import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import LlamaConfig

from scripts.lib.eagle3.export import save_drafter
from scripts.lib.eagle3.model import Drafter, DrafterConfig
from scripts.lib.ground.manifest import NAME, read_manifest
from scripts.lib.ground.stage import Job, run
from scripts.lib.training.batches import epoch_order
from scripts.lib.training.build import train
from scripts.lib.training.inputs import Inputs, read_inputs
from scripts.lib.training.settings import TrainSettings

log = logging.getLogger("benchmark")
RATE = 1e-4


@dataclass(frozen=True)
class Trained:
    """One drafter: what it was trained on and how long that took."""

    folder: str
    passes: int
    trained_tokens: int
    steps: int
    seconds: float


def main() -> None:
    """Train both and print one line of JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_versus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, help="folder of a finished run: hidden, vocab and target are read")
    parser.add_argument("--folder", type=Path, required=True, help="where both drafters go, below results/ of the repository")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--recipe", type=json.loads, default={}, help="JSON: what of the run's own recipe is changed for ours")
    parser.add_argument("--only", choices=("both", "ours", "specforge"), default="both")
    for name, default, text in (
        ("passes", 10, "over all rows, of both"),
        ("ttt", 7, "draft steps in training, of both"),
        ("batch", 1, "rows of one of SpecForge's steps"),
        ("draft-steps", 3, "of both when they are served"),
        ("threads", 8, "of the CPU"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    job = our_job(arguments)
    made = {}
    if arguments.only != "specforge":
        made["ours"] = ours(job)
    if arguments.only != "ours":
        made["specforge"] = theirs(job, arguments)
    (arguments.folder / "config.yaml").write_text(yaml.safe_dump(served(arguments, made), sort_keys=False))
    print(json.dumps({name: asdict(figures) for name, figures in made.items()}))


def our_job(arguments: argparse.Namespace) -> Job:
    """Stage train on the run's states with the run's own recipe, in bf16 on a GPU."""
    drafter = next(arguments.run.glob("drafters/*/manifest.json"))
    settings = read_manifest(drafter, "train").settings
    precision = "bfloat16" if arguments.device == "cuda" else "float32"
    same = {"epochs": arguments.passes, "ttt_steps": arguments.ttt, "precision": precision, "start_from": None}
    recipe = settings["drafter"] | same | arguments.recipe
    inputs = {name: (arguments.run / name / NAME,) for name in ("hidden", "vocab", "target")}
    runtime = {"device": arguments.device, "threads": arguments.threads}
    return Job(
        "train", arguments.folder / "ours", inputs, {**settings, "drafter": recipe, "name": "ours"}, runtime, arguments.folder / "work"
    )


def ours(job: Job) -> Trained:
    """Run the stage; nothing is done again when its folder is there."""
    start = time.perf_counter()
    run(job, train)
    figures, cost = (json.loads((job.output / name).read_text()) for name in ("training.json", "cost.json"))
    seconds = cost.get("seconds", time.perf_counter() - start)
    return Trained(str(job.output), job.settings["drafter"]["epochs"], cost["trained_tokens"], figures["steps"], seconds)


def theirs(job: Job, arguments: argparse.Namespace) -> Trained:
    """SpecForge's drafter after as many passes over the same rows, exported."""
    from specforge.optimizer import BF16Optimizer

    from benchmarks.train_specforge import dtype_on, its_model, padded, train_step

    device, folder = arguments.device, arguments.folder / "specforge"
    inputs = read_inputs(job, TrainSettings.of(job.settings))
    attention = "flex_attention" if device == "cuda" else "sdpa"
    torch.manual_seed(job.settings["seed"])
    text = inputs.target.config.get_text_config()
    model = its_model(LlamaConfig(**text.to_dict()), inputs.vocabulary.target_ids, arguments.ttt, device, attention)
    with torch.no_grad():
        model.draft_model.embed_tokens.weight.copy_(inputs.target.embedding())
    weight = inputs.target.head().to(device, dtype_on(device))
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(weight, requires_grad=False)
    rows, size = inputs.train.rows, arguments.batch
    steps = -(-len(rows) // size) * arguments.passes
    optimizer = BF16Optimizer(model, lr=RATE, total_steps=steps)
    start = time.perf_counter()
    for epoch in range(arguments.passes):
        order = epoch_order(len(rows), job.settings["seed"], epoch)
        for first in range(0, len(order), size):
            train_step(model, head, optimizer, padded([rows[index] for index in order[first : first + size]], device))
        log.info("specforge: pass %d of %d, %.0f s", epoch + 1, arguments.passes, time.perf_counter() - start)
    export(model.draft_model, inputs, folder)
    tokens = arguments.passes * sum(len(row.slots) for row in rows)
    return Trained(str(folder), arguments.passes, tokens, steps, round(time.perf_counter() - start, 1))


def export(draft: nn.Module, inputs: Inputs, folder: Path) -> None:
    """Write its drafter as SGLang loads it: its tensors have the names of ours, its embedding is the target's."""
    vocabulary = inputs.vocabulary
    drafter = Drafter(
        DrafterConfig.from_target(inputs.target.config, len(vocabulary.d2t), inputs.boundaries), vocabulary.d2t, vocabulary.t2d
    )
    drafter.load_state_dict({name: tensor.cpu() for name, tensor in draft.state_dict().items() if name in drafter.state_dict()})
    folder.mkdir(exist_ok=True)
    save_drafter(drafter, folder)


def served(arguments: argparse.Namespace, made: dict[str, Trained]) -> dict[str, Any]:
    """The config by which the run's tasks are answered with each drafter in SGLang; the default's own variants are left out."""
    default = yaml.safe_load((Path(__file__).parents[1] / "config.yaml").read_text())["benchmark"]["variants"]
    dtype = "float32" if arguments.device == "cpu" else "bfloat16"
    served = {"engine": "sglang", "draft_steps": arguments.draft_steps, "dtype": dtype}
    variants = {name: served | {"drafter": f"path:{Path(figures.folder).resolve()}"} for name, figures in made.items()}
    return {
        "run": arguments.run.name,
        "runtime": {"device": arguments.device},
        "benchmark": {"variants": dict.fromkeys(default) | variants},
    }


if __name__ == "__main__":
    main()
