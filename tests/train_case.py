"""A finished `hidden`, `vocab` and `target` of a tiny target, as stage `train` reads them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from scripts.lib.ground.manifest import NAME, Counts, Manifest, Shard
from scripts.lib.ground.stage import Job
from scripts.lib.states.format import HiddenShard, write_shard
from scripts.lib.vocabulary.tables import tables, write_vocabulary
from tests.tiny import save_tiny_target

BOUNDARIES = [2, 4, 5]
SETTINGS: dict[str, Any] = {
    "drafter": {
        "epochs": 2,
        "batch_tokens": 60,
        "learning_rate": 0.003,
        "warmup_share": 0.1,
        "clip": 0.5,
        "ttt_steps": 3,
        "ttt_decay": 0.8,
        "warm_start": True,
        "precision": "float32",
        "eval_every": 4,
        "checkpoint_every": 2,
    },
    "name": "eagle3",
    "seed": 7,
}


def make_case(root: Path, train_rows: int = 16, eval_rows: int = 4) -> None:
    """Write all three stages' folders below `root`."""
    save_tiny_target(root / "target")
    publish(root / "target", "target", [root / "target" / "model.safetensors"], {})
    model = LlamaForCausalLM.from_pretrained(root / "target", dtype=torch.float32).eval()
    (root / "hidden").mkdir()
    shards = [shard(model, split, count) for split, count in (("train", train_rows), ("eval", eval_rows))]
    paths = [root / "hidden" / f"{split}-00000.safetensors" for split in ("train", "eval")]
    for path, content in zip(paths, shards, strict=True):
        write_shard(path, content)
    facts = {"boundaries": BOUNDARIES, "num_layers": 8, "hidden_size": 64, "final": "post-norm", "dtype": "bfloat16"}
    publish(root / "hidden", "hidden", paths, facts)
    (root / "vocab").mkdir()
    ids = np.union1d(np.arange(40), shards[0].argmax.unique().numpy())
    publish(root / "vocab", "vocab", [write_vocabulary(root / "vocab", tables(ids, 272))], {})


def publish(folder: Path, stage: str, paths: list[Path], facts: Mapping[str, Any]) -> None:
    """Write the manifest of `stage` over the files at `paths`."""
    Manifest(stage, {}, {}, Counts(1, 1), [Shard.of(path, 1) for path in paths], facts).write(folder)


@torch.no_grad()
def shard(model: LlamaForCausalLM, split: str, count: int) -> HiddenShard:
    """`count` rows of 6 to 9 random prompt tokens with greedy answers of 8 to 16 tokens, and the target's states."""
    generator = torch.Generator().manual_seed(len(split))
    ids, aux, final, index, argmax, spans, offsets = [], [], [], [], [], [], [0]
    for number in range(count):
        prompt = torch.randint(3, 272, (1, 6 + number % 4), generator=generator)
        row = model.generate(prompt, max_new_tokens=8 + number % 9, do_sample=False, eos_token_id=None)
        output = model.model(row, output_hidden_states=True)
        first, last = prompt.shape[1], row.shape[1]
        taught = torch.arange(first, last - 1)
        ids.append(row[0].int())
        aux.append(torch.stack([output.hidden_states[layer][0] for layer in BOUNDARIES], 1).bfloat16())
        final.append(output.last_hidden_state[0, taught].bfloat16())
        argmax.append(model.lm_head(output.last_hidden_state[0, taught]).argmax(-1).int())
        index.append(taught + offsets[-1])
        spans.append([first + offsets[-1], last + offsets[-1]])
        offsets.append(offsets[-1] + last)
    names = tuple(f"{split}{number}" for number in range(count))
    return HiddenShard(
        torch.cat(ids),
        torch.tensor(offsets),
        torch.cat(aux),
        torch.cat(final),
        torch.cat(index),
        torch.cat(argmax),
        torch.tensor(spans),
        names,
    )


def job(root: Path, output: Path, **drafter: Any) -> Job:
    """The job that trains on the case below `root` into `output`, with some settings of the drafter changed."""
    settings = SETTINGS | {"drafter": SETTINGS["drafter"] | drafter}
    inputs = {name: (root / name / NAME,) for name in ("hidden", "vocab", "target")}
    return Job("train", output, inputs, settings, {"device": "cpu", "threads": 1}, output.parent / "work")
