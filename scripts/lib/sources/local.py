"""Files on this machine, pinned by a copy: a later edit in place must not reach what was published."""

import glob
import shutil
from pathlib import Path

from scripts.lib.ground.errors import StageError
from scripts.lib.sources.settings import Fetched, SourceSettings
from scripts.lib.sources.wheels import matching


def fetch_path(settings: SourceSettings, folder: Path) -> Fetched:
    """Copy the file, the folder's files or the files of the glob that the settings name into `folder`/files."""
    locator = settings.address.locator
    root, names = local_files(locator)
    if settings.members or settings.exclude:
        names = matching(names, settings.members or ("*",), settings.exclude, locator)
    files = {}
    for name in names:
        target = folder / "files" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, target)
        files[target] = 0
    return Fetched(files, {})


def local_files(locator: str) -> tuple[Path, list[str]]:
    """A folder and the sorted names below it that `locator` stands for.

    Raises StageError when it is neither a file, nor a folder with files, nor a glob that matches files.
    """
    path = Path(locator).expanduser()
    if path.is_dir():
        root, found = path, [file for file in path.rglob("*") if file.is_file()]
    else:
        found = [path] if path.is_file() else [Path(file) for file in glob.glob(str(path), recursive=True) if Path(file).is_file()]
        root = common_folder(found)
    if not found:
        near = sorted(entry.name for entry in path.parent.iterdir())[:12] if path.parent.is_dir() else []
        raise StageError(f"source path:{locator}: no file there; {path.parent} holds {', '.join(near) or 'nothing or does not exist'}")
    return root, sorted(file.relative_to(root).as_posix() for file in found)


def common_folder(files: list[Path]) -> Path:
    """The deepest folder that holds all `files`."""
    folder = files[0].parent if files else Path()
    while not all(file.is_relative_to(folder) for file in files):
        folder = folder.parent
    return folder
