"""What a rule's code is: the entry script, the project modules it imports, and a digest of each.

Snakemake compares shell commands and params, not the Python modules behind them.
Rules therefore list their modules' digests as params.
"""

import os
from functools import cache
from pathlib import Path

from scripts.lib.ground.sources import Sources

ROOT = Path(__file__).parents[3]
DECIDES_NOTHING = "DECIDES_NO_BYTE = True"  # a line in the __init__.py of a room whose code no result depends on


def code(entry: str) -> dict[str, str]:
    """One param per source file behind `entry`, so that a plan names the file that changed."""
    found = {f"code{i}": f"{path}@{digest(path)}" for i, path in enumerate(closure(entry))}
    sources(ROOT).keep()
    return found


def closure(entry: str) -> list[str]:
    """`entry` and every project module that it imports, directly or not, as sorted paths below the repository."""
    todo, seen = [entry], set()
    while todo:
        path = todo.pop()
        if path not in seen and decides(path):
            seen.add(path)
            todo.extend(project_imports(path))
    return sorted(seen)


@cache
def decides(path: str) -> bool:
    """Whether the file at `path` can change a result: its room does not say otherwise."""
    room = (ROOT / path).with_name("__init__.py")
    return not (room.is_file() and any(line.startswith(DECIDES_NOTHING) for line in room.read_text().splitlines()))


@cache
def project_imports(path: str) -> list[str]:
    """Paths of the project modules that the file at `path` imports, with the packages they lie in."""
    names = sources(ROOT).imports(path)
    stems = {"/".join(parts[:size]) for parts in (name.split(".") for name in names) for size in range(1, len(parts) + 1)}
    candidates = [f"{stem}.py" for stem in stems] + [f"{stem}/__init__.py" for stem in stems]
    return sorted(candidate for candidate in candidates if os.path.isfile(f"{ROOT}/{candidate}"))


@cache
def digest(path: str) -> str:
    """Hash of a source file that ignores comments, docstrings and blank lines."""
    return sources(ROOT).digest(path)


@cache
def sources(root: Path) -> Sources:
    """The files below `root`, read once."""
    return Sources.below(root)
