"""What a drafter was trained on, against what would be served."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.lib.chat.template import ChatTemplate
from scripts.lib.doctor.findings import Finding
from scripts.lib.doctor.repairs import finding
from scripts.lib.doctor.vocabularies import same_tokens
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import sha256_file
from scripts.lib.ground.manifest import Shard, read_manifest

TARGET_MANIFEST = "target/manifest.json"
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


@dataclass(frozen=True)
class Training:
    """What the manifest of a training at `path` says: the boundaries, and the digest of its target's manifest by that one's path."""

    path: Path
    boundaries: list[int] | None
    target: tuple[str, str] | None

    def target_manifest(self) -> Path | None:
        """The manifest of the target that it was trained on, where it still is what it was; None when it is gone."""
        if self.target is None:
            return None
        name, digest = self.target
        run = self.path.resolve().parent.parent.parent  # results/<run> of results/<run>/drafters/<drafter>/manifest.json
        return next((path for path in (Path(name), run / TARGET_MANIFEST) if path.is_file() and sha256_file(path) == digest), None)


def find_training(drafter: Path, manifest: Path | None) -> Training | None:
    """The training of `drafter` by its `manifest`, else by one in its folder or, for a folder `best`, in the one above."""
    places = [manifest] if manifest is not None else [drafter / "manifest.json", drafter.resolve().parent / "manifest.json"]
    found = next((path for path in places if path.is_file() and json.loads(path.read_text()).get("stage") == "train"), None)
    if found is None and manifest is not None:
        raise StageError(f"{manifest}: no manifest of stage train; give the manifest.json of the drafter's training")
    return None if found is None else read_training(found)


def read_training(path: Path) -> Training:
    """The training whose manifest is at `path`."""
    manifest = read_manifest(path, "train")
    target = next(((name, digest) for name, digest in manifest.inputs.items() if name.endswith(TARGET_MANIFEST)), None)
    return Training(path, manifest.facts.get("boundaries"), target)


def training_findings(trained: Training, target: Path) -> Iterator[Finding]:
    """Where the folder `target` that would be served is not the one of the training."""
    if trained.target is None:
        return
    before, here = trained.target_manifest(), target / "manifest.json"
    same = here.is_file() and sha256_file(here) == trained.target[1]
    recorded = before or (here if same else None)
    if recorded is not None:
        yield from changed_findings(recorded, target)
    elif here.is_file():
        yield finding("other_target", f"{here} is not the manifest of the drafter's target, {trained.target[0]}, which is gone")
    else:
        name = trained.target[0]
        yield finding("training_unknown", f"{name} of the training is gone: tokenizer, template and weights are not compared", fatal=False)


def changed_findings(recorded: Path, target: Path) -> Iterator[Finding]:
    """Files of `target` that are not what the manifest `recorded` of the training's target says: texts by digest, weights cheaply."""
    manifest = read_manifest(recorded, "target")
    shards = {shard.name: shard for shard in manifest.shards}
    changed = [name for name in TOKENIZER if altered(shards.get(name), target / name)]
    # Where the training's own folder is another one, its tokenizer can be tried; else the digest alone tells.
    before = recorded.parent if recorded.parent.resolve() != target.resolve() else None
    if changed and not (before and same_tokens(before, target)):
        yield finding("tokenizer_differs", f"{', '.join(changed)} of {target} is not that of the training ({recorded})")
    digest, trained = ChatTemplate.load(target).digest, manifest.facts.get("chat_template_sha256")
    if digest != trained:
        yield finding(
            "template_differs", f"the chat template of {target} has sha256 {digest[:12]}, that of the training {str(trained)[:12]}"
        )
    weights = sorted(name for name in shards if name.endswith(".safetensors") and not unchanged(shards[name], target))
    if weights:
        yield finding("other_target", f"{', '.join(weights)} of {target} hold other weights than the training's target ({recorded})")


def altered(shard: Shard | None, path: Path) -> bool:
    """Whether the small file at `path` is not the `shard` of a manifest, or is there where the manifest has none."""
    return path.is_file() if shard is None else not path.is_file() or sha256_file(path) != shard.sha256


def unchanged(shard: Shard, target: Path) -> bool:
    """Whether the weights `shard` lie in `target`: by the digest in its own manifest, or by their size where it has none."""
    path, manifest = target / shard.name, target / "manifest.json"
    if not path.is_file() or path.stat().st_size != shard.bytes:
        return False
    return not manifest.is_file() or digests(manifest).get(shard.name) == shard.sha256


def digests(manifest: Path) -> Mapping[str, str]:
    """sha256 of each file that the manifest of a target names."""
    return {shard.name: shard.sha256 for shard in read_manifest(manifest, "target").shards}
