"""Stands in for xgrammar, which constrains output to a grammar: with `--grammar-backend none` only its names are needed.

Any name in capitals is an empty model, any other a function that gives None; submodules hold the same.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

__version__ = "0.0.0"


class StructuralTag(BaseModel):
    """A named class: SGLang derives from it."""


def nothing(*_: Any, **__: Any) -> None:
    """What every function here does."""


def any_name(name: str) -> Any:
    """An attribute that nobody defined."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (BaseModel,), {}) if name[:1].isupper() else nothing


class Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every `xgrammar.…` that is asked for."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> Any:
        """A spec for submodules of xgrammar only."""
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("xgrammar.") else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """A module that has every name."""
        module = types.ModuleType(spec.name)
        vars(module)["__getattr__"] = any_name
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing runs in it; it may have submodules of its own."""
        module.__path__ = []


__getattr__ = any_name
sys.meta_path.append(Submodules())
