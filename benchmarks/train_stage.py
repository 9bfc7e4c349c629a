"""Trained tokens a second of the whole stage `train`, with states read from disk: made-up shards of a known target's sizes.

Writes a target, a draft vocabulary and shards of hidden states below `--folder`, then runs the stage on them. The rate is that
of the last two fifths of the optimizer steps, which unroll all draft steps, without what is compiled before and the evaluation
at the end.
The last line is JSON. Run: python -m benchmarks.train_stage --device cuda --shape smollm2 --folder /tmp/stage
"""

import argparse
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.train_rows import SHAPES, Shape, conversations, made_up_rows
from scripts.lib.ground.manifest import NAME, Counts, Manifest, Shard
from scripts.lib.ground.stage import Job, run
from scripts.lib.states.encoded import decoded
from scripts.lib.states.format import HiddenShard, write_shard
from scripts.lib.states.storing import DTYPES, Storing
from scripts.lib.training.batches import TrainingRow, offsets
from scripts.lib.training.build import train
from scripts.lib.vocabulary.tables import tables, write_vocabulary

ROWS_PER_SHARD = 200


def main() -> None:
    """Make the inputs, run the stage, print one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_stage", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="demo")
    parser.add_argument("--folder", type=Path, required=True, help="new or empty")
    for name, default in (("rows", 2000), ("epochs", 6), ("batch-tokens", 32768), ("micro-tokens", 32768), ("threads", 8), ("ranks", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--stored", choices=DTYPES, default=DTYPES[0], help="of the states on disk")
    parser.add_argument("--shard", action="store_true", help="ranks share masters, gradients and optimizer")
    parser.add_argument("--recompute", action="store_true", help="compute draft steps again in the backward pass")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    shape = SHAPES[arguments.shape]
    make_inputs(arguments.folder, shape, arguments.rows, Storing(arguments.stored))
    job = stage_job(arguments.folder, shape, arguments)
    run(job, train)
    cost = json.loads((job.output / "cost.json").read_text())
    size = sum(path.stat().st_size for path in (arguments.folder / "hidden").iterdir())
    figures = {"shape": arguments.shape, "device": arguments.device, "ranks": arguments.ranks, "ttt": shape.steps}
    figures |= {"stored": arguments.stored, "batch_tokens": arguments.batch_tokens, "hidden_bytes": size}
    print(json.dumps(figures | {"trained_tokens_per_second": cost["trained_tokens_per_second"], "cost": cost}))


def stage_job(folder: Path, shape: Shape, arguments: argparse.Namespace) -> Job:
    """The job that trains on the inputs below `folder`."""
    config = shape.config()
    drafter = {
        "optimizer": shape.optimizer,
        "layers": config.num_hidden_layers,
        "intermediate_size": config.intermediate_size,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "epochs": arguments.epochs,
        "batch_tokens": arguments.batch_tokens,
        "micro_tokens": arguments.micro_tokens,
        "learning_rate": 1e-4,
        "warmup_share": 0.05,
        "clip": 0.5,
        "ttt_steps": shape.steps,
        "ttt_decay": 0.8,
        "warm_start": False,
        "precision": "bfloat16" if arguments.device == "cuda" else "float32",
        "eval_every": 10**9,
        "checkpoint_every": 10**9,
    }
    inputs = {name: (folder / name / NAME,) for name in ("hidden", "vocab", "target")}
    runtime = {"device": arguments.device, "threads": arguments.threads, "ranks": arguments.ranks}
    runtime |= {"shard": arguments.shard, "recompute": arguments.recompute}
    return Job("train", folder / "drafter", inputs, {"drafter": drafter, "name": "made_up", "seed": 0}, runtime, folder / "work")


def make_inputs(folder: Path, shape: Shape, count: int, storing: Storing) -> None:
    """Write `target`, `vocab` and `hidden` below `folder`."""
    for name in ("target", "vocab", "hidden"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
    shape.target().save_pretrained(folder / "target")
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.weight": (torch.randn(shape.vocabulary, shape.hidden, generator=generator) * 0.02).bfloat16()
        for name in ("model.embed_tokens", "lm_head")
    }
    save_file(weights | {"model.norm.weight": torch.ones(shape.hidden).bfloat16()}, folder / "target" / "model.safetensors")
    finish(folder / "target", "target", [folder / "target" / "model.safetensors"], {})
    ids = np.arange(shape.draft_vocabulary) * (shape.vocabulary // shape.draft_vocabulary)
    finish(folder / "vocab", "vocab", [write_vocabulary(folder / "vocab", tables(ids, shape.vocabulary))], {})
    rows = made_up_rows(shape, conversations(count, shape.longest))
    paths = []
    for split, part in (("eval", rows[:40]), ("train", rows[40:])):
        for number in range(0, len(part), ROWS_PER_SHARD):
            paths.append(folder / "hidden" / f"{split}-{number // ROWS_PER_SHARD:05d}.safetensors")
            write_shard(paths[-1], shard(part[number : number + ROWS_PER_SHARD]), storing)
    facts = {
        "boundaries": [2, shape.layers // 2, shape.layers - 3],
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "final": "post-norm",
    }
    finish(folder / "hidden", "hidden", paths, {**facts, "dtype": "bfloat16"})


def finish(folder: Path, stage: str, paths: Sequence[Path], facts: dict[str, Any]) -> None:
    """Write the manifest of `stage` over the files at `paths`."""
    Manifest(stage, {}, {}, Counts(1, 1), [Shard.of(path, 1) for path in paths], facts).write(folder)


def shard(rows: Sequence[TrainingRow]) -> HiddenShard:
    """`rows` as stage hidden stores them: one token more than a row has positions, and one behind it that is predicted last."""
    starts = offsets([len(row.aux) + 2 for row in rows])
    spans = []
    for row, start in zip(rows, starts, strict=False):
        firsts = [0, *((row.remaining[:-1] == 1).nonzero().flatten() + 1).tolist()]
        spans += [[start + int(row.slots[first]) + 1, start + int(row.slots[first]) + int(row.remaining[first]) + 2] for first in firsts]
    padding = decoded(rows[0].aux)[:2]
    return HiddenShard(
        input_ids=torch.cat([torch.cat([row.tokens, row.tokens[-1:]]) for row in rows]),
        row_offsets=torch.tensor(starts),
        aux=torch.cat([torch.cat([decoded(row.aux), padding]) for row in rows]),
        final=torch.cat([decoded(row.final) for row in rows]),
        final_index=torch.cat([row.slots + 1 + start for row, start in zip(rows, starts, strict=False)]),
        argmax=torch.cat([row.argmax for row in rows]),
        loss_spans=torch.tensor(spans),
        ids=tuple(row.id for row in rows),
    )


if __name__ == "__main__":
    main()
