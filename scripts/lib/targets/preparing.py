"""Stage target: the model as every later stage reads it."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from scripts.lib.chat.template import ChatTemplate
from scripts.lib.ground.files import sha256_file, write_json
from scripts.lib.ground.manifest import Counts, Manifest, Shard
from scripts.lib.ground.stage import Job, Result
from scripts.lib.targets.origins import from_hub, from_path, from_wheel
from scripts.lib.targets.settings import TargetSettings

ORIGINS = {"hub": from_hub, "path": from_path, "wheel": from_wheel}
NAME = "target.json"


def target(job: Job, folder: Path) -> Result:
    """Fill `folder` with the HF layout and target.json; the manifest counts files."""
    settings = TargetSettings.of(job.settings)
    for leftover in folder.iterdir():
        if leftover.is_file():
            leftover.unlink()
    placed = ORIGINS[settings.address.kind](settings, folder)
    facts = {"source": f"{settings.address.kind}:{settings.address.locator}", **placed.facts, **model_facts(folder)}
    files = sorted(path for path in folder.iterdir() if path.is_file())
    write_json(folder / NAME, {**facts, "files": {path.name: sha256_file(path) for path in files}})
    shards = [Shard.of(path, rows=0) for path in [*files, folder / NAME]]
    counts = Counts(rows_in=len(shards), rows_out=len(shards))
    return Result(
        Manifest("target", job.settings, job.input_digests(), counts, shards, {**facts, "unit": "files"}), {"weights": placed.weights}
    )


def model_facts(folder: Path) -> dict[str, Any]:
    """What later stages ask of the model in `folder`. Raises StageError without a chat template."""
    template = ChatTemplate.load(folder)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    text = config.get_text_config()
    return {
        "architecture": (config.architectures or [type(config).__name__])[0],
        "num_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "vocab_size": text.vocab_size,
        "max_position_embeddings": text.max_position_embeddings,
        "tied": bool(text.tie_word_embeddings),
        "eos_ids": sorted(template.eos_ids),
        "chat_template_sha256": template.digest,
        "dtype": "bfloat16",
    }
