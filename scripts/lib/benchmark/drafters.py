"""Where a variant's drafter lies: trained by this run, in a folder, or on the hub."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download

from scripts.lib.benchmark.settings import Settings
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import canonical, sha256_file
from scripts.lib.ground.manifest import read_manifest
from scripts.lib.ground.stage import Job

FILES = ["*.json", "*.safetensors", "*.bin", "*.txt", "*.model", "*.jinja"]


@dataclass(frozen=True)
class ServedDrafter:
    """A drafter's folder, a text that changes with its files as the tracked settings name them, and whether this run trained it."""

    folder: Path
    identity: str
    own: bool


def find_drafter(job: Job, settings: Settings) -> ServedDrafter | None:
    """The drafter of the variant, None where its algorithm has none. StageError when there is none at the place that the config names."""
    if settings.drafter is None:
        return None
    kind, _, locator = settings.drafter.partition(":")
    if not locator:
        manifest = job.input("drafter")
        read_manifest(manifest, "train")
        return ServedDrafter(manifest.parent, sha256_file(manifest), own=True)
    folder = Path(locator).expanduser().resolve() if kind == "path" else downloaded(locator, settings.revision)
    if not (folder / "config.json").is_file():
        raise StageError(f"benchmark.variants.{settings.variant}.drafter: {folder} holds no config.json; give a drafter's folder")
    return ServedDrafter(folder, canonical([settings.revision, job.settings.get("drafter_files")]), own=False)


def downloaded(repository: str, revision: str | None) -> Path:
    """The repository's files, from the cache or the network."""
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=FILES))
    except (OSError, ValueError) as error:
        raise StageError(f"drafter hub:{repository} at {revision}: {error}; check the id, the revision and the network") from error
