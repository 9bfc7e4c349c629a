"""What a rule's code is: the entry script, the project modules it imports, and a digest of each.

Snakemake compares shell commands and params, not the Python modules behind them.
Rules therefore list their modules' digests as params.
"""

import ast
import hashlib
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
# A string, which may hold a "#", in group 1; or a comment. `tokenize` gives the same in ten times the time.
STRING_OR_COMMENT = re.compile(
    r'''("""(?:\\.|[^\\])*?"""|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|#[^\n]*''', re.DOTALL
)
BODIES = ("body", "orelse", "finalbody", "handlers", "cases")  # where a statement holds others
DECIDES_NOTHING = "DECIDES_NO_BYTE = True"  # a line in the __init__.py of a room whose code no result depends on


def code(entry: str) -> dict[str, str]:
    """One param per source file behind `entry`, so that a plan names the file that changed."""
    return {f"code{i}": f"{path}@{digest(path)}" for i, path in enumerate(closure(entry))}


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
    names: list[str] = []
    for node in statements((ROOT / path).read_text()):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
    stems = {"/".join(parts[:size]) for parts in (name.split(".") for name in names) for size in range(1, len(parts) + 1)}
    candidates = [f"{stem}.py" for stem in stems] + [f"{stem}/__init__.py" for stem in stems]
    return sorted(candidate for candidate in candidates if os.path.isfile(f"{ROOT}/{candidate}"))


@cache
def digest(path: str) -> str:
    """Hash of a source file that ignores comments, docstrings and blank lines.

    It hashes text, not `ast.dump`, whose output differs between Python versions.
    """
    text = "\n".join(significant_lines((ROOT / path).read_text()))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def significant_lines(source: str) -> list[str]:
    """The lines of `source` without comments, docstrings and blank lines."""
    lines = STRING_OR_COMMENT.sub(lambda found: found[1] or "", source).splitlines()
    for node in docstrings(source):
        end = node.end_lineno or node.lineno
        lines[node.lineno - 1 : end] = [""] * (end - node.lineno + 1)
    return [line.rstrip() for line in lines if line.strip()]


def docstrings(source: str) -> Iterator[ast.Expr]:
    """The docstring nodes of a module, its classes and its functions."""
    for node in statements(source):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                yield first


@cache
def statements(source: str) -> list[ast.AST]:
    """The module and all nodes that are or hold statements: expressions, most of all nodes, hold neither imports nor docstrings."""
    found: list[ast.AST] = [ast.parse(source)]
    for node in found:
        for part in BODIES:
            found.extend(getattr(node, part, ()))
    return found
