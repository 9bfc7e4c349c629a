"""Stand-ins for packages that a library imports but the work at hand does not need.

A stand-in can be imported and named; using it is an error that says which package to install.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

from scripts.lib.ground.errors import StageError


class AbsentModule(ModuleType):
    """A module whose every public name is a class that refuses to be used."""

    purpose: str

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        package, purpose = self.__name__.partition(".")[0], self.purpose

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise StageError(f"{purpose} needs the package {package}, which is not installed: pip install {package}")

        return type(name, (), {"__new__": refuse})


class AbsentFinder(MetaPathFinder, Loader):
    """Finds stand-ins for `packages` and all of their modules."""

    def __init__(self, packages: Sequence[str], purpose: str) -> None:
        self.packages, self.purpose = frozenset(packages), purpose

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """A spec for a module of one of the packages, None for any other."""
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in self.packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty stand-in."""
        module = AbsentModule(spec.name)
        module.purpose = self.purpose
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


@contextmanager
def standing_in(packages: Sequence[str], purpose: str) -> Iterator[None]:
    """Let those of `packages` that are not installed be imported inside; what uses one raises StageError naming `purpose`."""
    finder = AbsentFinder([package for package in packages if find_spec(package) is None], purpose)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
