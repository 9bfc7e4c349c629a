"""Datasets and files of the Hugging Face hub at a pinned revision."""

from pathlib import Path
from typing import Any

import datasets
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from scripts.lib.ground.errors import StageError
from scripts.lib.sources.local import local_files
from scripts.lib.sources.settings import Fetched, SourceSettings, checked_revision
from scripts.lib.sources.wheels import matching

# The hub's own errors are OSErrors; those of the HTTP library that it uses, such as that there is no network, are the other base of them.
HTTP_ERRORS: Any = HfHubHTTPError.__bases__
HUB_ERRORS: tuple[type[Exception], ...] = (OSError, ValueError, datasets.exceptions.DatasetsError, *HTTP_ERRORS)


def fetch_hub(settings: SourceSettings, folder: Path) -> Fetched:
    """Write the dataset as Parquet into `folder`/files, or with `members` its repository's files as they are.

    Some repositories hold files that the datasets library cannot put into one table; `members` takes those raw.
    """
    repository = settings.address.locator
    revision = checked_revision(f"hub:{repository}", settings.revision)
    if settings.members:
        return Fetched(raw_files(settings, repository, revision, folder / "files"), {"revision": revision})
    table = load(repository, revision, settings.subset, settings.split)
    path = folder / "files" / "data.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_parquet(path)
    return Fetched({path: len(table)}, {"revision": revision, "subset": settings.subset, "split": str(table.split)})


def load(repository: str, revision: str, subset: str | None, split: str | None) -> datasets.Dataset:
    """One split of the dataset; StageError when it cannot be read or when several splits leave the choice open."""
    try:
        loaded: Any = datasets.load_dataset(repository, name=subset, split=split, revision=revision)
    except HUB_ERRORS as error:
        raise StageError(f"hub:{repository} at {revision[:8]}: {error}; check id, revision, subset and split, and the network") from error
    if isinstance(loaded, datasets.Dataset):
        return loaded
    if len(loaded) != 1:
        raise StageError(f"hub:{repository}: several splits, set `split` to one of {', '.join(sorted(loaded))}")
    (only,) = loaded.values()
    return only


def raw_files(settings: SourceSettings, repository: str, revision: str, folder: Path) -> dict[Path, int]:
    """Download the files that `members` takes and `exclude` leaves."""
    try:
        snapshot_download(
            repository,
            repo_type="dataset",
            revision=revision,
            local_dir=folder,
            allow_patterns=list(settings.members),
            ignore_patterns=list(settings.exclude),
        )
    except HUB_ERRORS as error:
        raise StageError(f"hub:{repository} at {revision[:8]}: {error}; check id, revision and the network") from error
    _, names = local_files(str(folder))
    kept = [name for name in names if not name.startswith(".cache/")]
    return {folder / name: 0 for name in matching(kept, settings.members, settings.exclude, f"hub:{repository}")}
