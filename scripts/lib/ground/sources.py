"""What a Python source file imports, and a digest of what in it counts.

Parsing a few hundred files takes a second, in every plan and every job; what came of it is therefore kept beside Snakemake's own
records, by the bytes of each file: nothing there can be out of date, and losing it costs that second.
"""

import ast
import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# A string, which may hold a "#", in group 1; or a comment. `tokenize` gives the same in ten times the time.
STRING_OR_COMMENT = re.compile(
    r'''("""(?:\\.|[^\\])*?"""|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|#[^\n]*''', re.DOTALL
)
BODIES = ("body", "orelse", "finalbody", "handlers", "cases")  # where a statement holds others
OWN = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]  # other code reads files in another way


@dataclass
class Sources:
    """The source files below `root`, with what was found out about files of the same bytes before."""

    root: Path
    known: dict[str, tuple[list[str], str]] = field(default_factory=dict)
    new: bool = False

    @classmethod
    def below(cls, root: Path) -> "Sources":
        """With all that an earlier process kept; without, where that cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            return cls(root, json.loads(kept_at(root).read_text()))
        return cls(root)

    def imports(self, path: str) -> list[str]:
        """The dotted names that the file at `path` imports, those of modules and of what is taken from them."""
        return self._facts(path)[0]

    def digest(self, path: str) -> str:
        """Hash of the file at `path` that ignores comments, docstrings and blank lines."""
        return self._facts(path)[1]

    def keep(self) -> None:
        """Write down what is new; a folder that cannot be written to is no error."""
        if not self.new:
            return
        path = kept_at(self.root)
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
                json.dump(self.known, file)
            os.replace(file.name, path)
            self.new = False

    def _facts(self, path: str) -> tuple[list[str], str]:
        data = (self.root / path).read_bytes()
        key = hashlib.sha256(data).hexdigest()
        if key not in self.known:
            tree = statements(data.decode())
            self.known[key] = imported_names(tree), digest_of(data.decode(), tree)
            self.new = True
        return self.known[key]


def kept_at(root: Path) -> Path:
    """Where it is kept, in the folder of Snakemake's records."""
    return root / ".snakemake" / f"sources-{OWN}.json"


def imported_names(tree: list[ast.AST]) -> list[str]:
    """The dotted names that the statements in `tree` import."""
    names: list[str] = []
    for node in tree:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def digest_of(source: str, tree: list[ast.AST]) -> str:
    """Hash of the significant lines of `source`: of text, not of `ast.dump`, whose output differs between Python versions."""
    text = "\n".join(significant_lines(source, tree))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def significant_lines(source: str, tree: list[ast.AST]) -> list[str]:
    """The lines of `source` without comments, docstrings and blank lines."""
    lines = STRING_OR_COMMENT.sub(lambda found: found[1] or "", source).splitlines()
    for node in docstrings(tree):
        end = node.end_lineno or node.lineno
        lines[node.lineno - 1 : end] = [""] * (end - node.lineno + 1)
    return [line.rstrip() for line in lines if line.strip()]


def docstrings(tree: list[ast.AST]) -> Iterator[ast.Expr]:
    """The docstring nodes of a module, its classes and its functions."""
    for node in tree:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                yield first


def statements(source: str) -> list[ast.AST]:
    """The module and all nodes that are or hold statements: expressions, most of all nodes, hold neither imports nor docstrings."""
    found: list[ast.AST] = [ast.parse(source)]
    for node in found:
        for part in BODIES:
            found.extend(getattr(node, part, ()))
    return found
