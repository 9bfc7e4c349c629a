"""A sound run in small, and ways to break its drafter, its target or its command line without any error."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from scripts.lib.chat.template import ChatTemplate
from scripts.lib.eagle3.export import save_drafter
from scripts.lib.eagle3.initial import initialise
from scripts.lib.eagle3.model import Drafter, DrafterConfig
from scripts.lib.ground.files import sha256_file, write_json
from scripts.lib.ground.manifest import Counts, Manifest, Shard
from tests.tiny import save_tiny_target, tiny_config

BOUNDARIES = (2, 4, 5)
LARGE = 64 * 2**20


@dataclass(frozen=True)
class Run:
    """A target and a drafter trained for it, in the layout of a run, and the flags that serve them."""

    target: Path
    drafter: Path
    algorithm: str
    flags: tuple[str, ...]

    def with_flag(self, name: str, value: str | None) -> "Run":
        """With `--name value`, or without it."""
        place = self.flags.index(f"--{name}")
        return replace(self, flags=(*self.flags[:place], *((f"--{name}", value) if value else ()), *self.flags[place + 2 :]))


def served(target: Path, drafter: Path) -> Run:
    """What serves `drafter` in chains of three."""
    options = {"algorithm": "EAGLE3", "draft-model-path": str(drafter), "num-steps": "3", "eagle-topk": "1", "num-draft-tokens": "4"}
    flags = [word for name, value in options.items() for word in (f"--speculative-{name}", value)]
    return Run(target, drafter, "EAGLE3", ("--model-path", str(target), *flags))


def tiny_run(folder: Path, seed: int = 0) -> Run:
    """A tiny target and an untrained drafter for it, with the manifests that stages target and train write."""
    target = save_tiny_target(folder / "target", seed=seed)
    write_target_manifest(target)
    drafter = folder / "drafters/eagle3"
    drafter.mkdir(parents=True)
    ids = torch.tensor([0, 2, 3, 7, 9, 40])
    t2d = torch.zeros(272, dtype=torch.bool).index_fill(0, ids, True)
    network = Drafter(DrafterConfig.from_target(tiny_config(), len(ids), BOUNDARIES), ids - torch.arange(len(ids)), t2d)
    initialise(network, 1)
    save_drafter(network, drafter)
    inputs = {str(target / "manifest.json"): sha256_file(target / "manifest.json")}
    Manifest("train", {}, inputs, Counts(1, 1), [], {"boundaries": list(BOUNDARIES)}).write(drafter)
    return served(target, drafter)


def write_target_manifest(target: Path) -> None:
    """The manifest of stage target over the files in `target`."""
    shards = [Shard.of(path, 0) for path in sorted(target.iterdir()) if path.name != "manifest.json"]
    facts = {"chat_template_sha256": ChatTemplate.load(target).digest}
    Manifest("target", {}, {}, Counts(len(shards), len(shards)), shards, facts).write(target)


def copied(run: Run, folder: Path) -> Run:
    """A copy of `run` in `folder` to break; large files are linked. Its training is still that of `run`."""
    for part in ("target", "drafter"):
        shutil.copytree(getattr(run, part), folder / part, copy_function=link_large)
    return served(folder / "target", folder / "drafter")


def link_large(source: str, place: str) -> None:
    """Copy a file, or link to it when copying would take long."""
    if Path(source).stat().st_size > LARGE:
        Path(place).symlink_to(Path(source).resolve())
    else:
        shutil.copy(source, place)


def edit_config(folder: Path, **values: object) -> None:
    """Set values of `config.json` in `folder`."""
    path = folder / "config.json"
    write_json(path, json.loads(path.read_text()) | values)


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Replace the tensors in `folder` by what `change` makes of them."""
    save_file(
        {name: tensor.contiguous() for name, tensor in change(load_file(folder / "model.safetensors")).items()},
        folder / "model.safetensors",
    )


def narrow(run: Run) -> Run:
    """`fc` for two layers."""
    edit_weights(run.drafter, lambda t: t | {"fc.weight": t["fc.weight"][:, : 2 * t["fc.weight"].shape[1] // 3]})
    return run


def shift_layers(run: Run) -> Run:
    """The ids of the states taken for those of the outputs: every layer one too high."""
    top = json.loads((run.drafter / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"]
    edit_config(run.drafter, eagle_config={"eagle_aux_hidden_state_layer_ids": top})
    return run


def rename_weights(run: Run) -> Run:
    """Names of a trainer of its own."""
    edit_weights(run.drafter, lambda t: {name.replace("midlayer.mlp", "block.ffn"): tensor for name, tensor in t.items()})
    return run


def drop_head(run: Run) -> Run:
    """The head forgotten on saving."""
    edit_weights(run.drafter, lambda t: {name: tensor for name, tensor in t.items() if name != "lm_head.weight"})
    return run


def absolute(run: Run) -> Run:
    """Target ids where offsets belong."""
    edit_weights(run.drafter, lambda t: t | {"d2t": t["d2t"] + torch.arange(len(t["d2t"]))})
    return run


def other_tables(run: Run) -> Run:
    """`t2d` of another vocabulary."""
    edit_weights(run.drafter, lambda t: t | {"t2d": t["t2d"].roll(1)})
    return run


def configured(**values: object) -> Callable[[Run], Run]:
    """Values of the drafter's config.json."""

    def change(run: Run) -> Run:
        edit_config(run.drafter, **values)
        return run

    return change


def states_off(run: Run) -> Run:
    """The target's states are not asked for."""
    eagle = json.loads((run.drafter / "config.json").read_text())["eagle_config"]
    edit_config(run.drafter, eagle_config=eagle | {"use_aux_hidden_state": False})
    return run


def rope(run: Run) -> Run:
    """The rotary base that engines take without one."""
    edit_config(run.drafter, rope_theta=500.0, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    return run


def other_tokenizer(run: Run) -> Run:
    """Two tokens change places."""
    path = run.target / "tokenizer.json"
    data = json.loads(path.read_text())
    vocabulary = data["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(data))
    return run


def other_template(run: Run) -> Run:
    """A line more in every prompt."""
    path = run.target / "chat_template.jinja"
    path.write_text(path.read_text() + "\n")
    return run


def other_target(run: Run) -> Run:
    """A fine-tuned target of the same shape, prepared by a run of its own."""
    weights = run.target / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.5
    weights.unlink()
    save_file(tensors, weights, metadata={"format": "pt"})
    (run.target / "manifest.json").unlink()
    write_target_manifest(run.target)
    return run


def flagged(name: str, value: str | None) -> Callable[[Run], Run]:
    """Another value of a flag, or none."""
    return lambda run: run.with_flag(name, value)


# What is done to a sound run, and the name that the doctor must give it.
BROKEN: dict[str, tuple[Callable[[Run], Run], str]] = {
    "EAGLE for EAGLE3": (flagged("speculative-algorithm", "EAGLE"), "eagle_for_eagle3"),
    "fc of another width": (narrow, "fc_width"),
    "layers one too high": (shift_layers, "layers_shifted"),
    "weights renamed": (rename_weights, "weights_renamed"),
    "head missing": (drop_head, "weights_missing"),
    "d2t of ids": (absolute, "d2t_absolute"),
    "d2t and t2d of two vocabularies": (other_tables, "d2t_t2d_disagree"),
    "head tied": (configured(tie_word_embeddings=True), "head_tied"),
    "another rotary base": (rope, "rope_differs"),
    "too few positions": (configured(max_position_embeddings=256), "positions_short"),
    "saved as float32": (configured(torch_dtype="float32"), "dtype_differs"),
    "states off": (
        states_off,
        "layers_unread",
    ),
    "another tokenizer": (other_tokenizer, "tokenizer_differs"),
    "another template": (other_template, "template_differs"),
    "another target": (other_target, "other_target"),
    "16 draft tokens of a chain": (flagged("speculative-num-draft-tokens", "16"), "steps_rewritten"),
    "no drafter named": (flagged("speculative-draft-model-path", None), "drafter_missing"),
    "no algorithm named": (flagged("speculative-algorithm", None), "no_speculation"),
    "DFLASH with an EAGLE-3 drafter": (flagged("speculative-algorithm", "DFLASH"), "other_algorithm"),
}
