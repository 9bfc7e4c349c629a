"""Data files inside Python wheels, fetched with pip so that its own settings (index, find-links, cache) hold."""

import difflib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import sha256_file
from scripts.lib.sources.settings import Fetched, SourceSettings

SHOWN = 12


def fetch_wheel(settings: SourceSettings, folder: Path) -> Fetched:
    """Unpack the members of the wheel that the settings name into `folder`/files."""
    name, version = settings.address.pinned()
    if not settings.members:
        raise StageError(f"source wheel:{name}=={version}: no members; set `members` to a list of globs over the names in the wheel")
    wheel = download_wheel(name, version, folder / "partial")
    with zipfile.ZipFile(wheel) as archive:
        chosen = matching(archive_files(archive), settings.members, settings.exclude, wheel.name)
        files = {Path(archive.extract(member, folder / "files")): 0 for member in chosen}
    return Fetched(files, {"version": version, "wheel": wheel.name, "wheel_sha256": sha256_file(wheel)})


def download_wheel(name: str, version: str, folder: Path) -> Path:
    """Fetch the wheel NAME==VERSION, without what it depends on, into the emptied `folder`.

    Raises StageError with pip's own words when there is none.
    """
    shutil.rmtree(folder, ignore_errors=True)
    options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, f"{name}=={version}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or not wheels:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or result.stderr.splitlines()[-1:]
        raise StageError(
            f"wheel {name}=={version}: pip download failed ({' '.join(errors)}); check name, version and pip's index or find-links"
        )
    return wheels[0]


def archive_files(archive: zipfile.ZipFile) -> list[str]:
    """Names of the files in `archive`, sorted."""
    return sorted(info.filename for info in archive.infolist() if not info.is_dir())


def matching(names: Sequence[str], members: Sequence[str], exclude: Sequence[str], place: str) -> list[str]:
    """The `names` that a glob of `members` takes and none of `exclude`; `*` also crosses folders.

    Raises StageError when a member glob takes nothing, naming what `place` holds instead.
    """
    for pattern in members:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise StageError(f"{place}: member {pattern!r} matches none of {len(names)} files; there are {shown(names, pattern)}")
    chosen = [name for name in names if any(fnmatchcase(name, pattern) for pattern in members)]
    kept = [name for name in chosen if not any(fnmatchcase(name, pattern) for pattern in exclude)]
    if not kept:
        raise StageError(
            f"{place}: `exclude` {list(exclude)} leaves none of the {len(chosen)} files that `members` takes; loosen one of them"
        )
    return kept


def shown(names: Sequence[str], pattern: str) -> str:
    """A few of `names`, those closest to `pattern`, for an error."""
    data = [name for name in names if not name.endswith((".py", ".pyc")) and ".dist-info/" not in name] or list(names)
    close = difflib.get_close_matches(pattern, data, n=SHOWN, cutoff=0.3) or data[:SHOWN]
    return ", ".join(close) + (f" and {len(names) - len(close)} more" if len(names) > len(close) else "")
