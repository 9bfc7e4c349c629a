"""What a cell says of the machine and of the packages that it was measured with."""

import sys
from pathlib import Path

import pytest

from scripts.lib.benchmark.machine import server_packages


def package(folder: Path, name: str, version: str | None) -> None:
    """The metadata of an installed package in `folder`; without a version it has no name either, as a broken one."""
    info = folder / f"{name}-{version or 'broken'}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" if version else "Metadata-Version: 2.1\n")


def test_the_copy_that_is_imported_gives_the_version_of_a_servers_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path / "first", "xgrammar", "0.2.1")
    package(tmp_path / "first", "nameless", None)
    package(tmp_path / "second", "xgrammar", "0.1.0")
    package(tmp_path / "second", "flashinfer_python", "0.6.15")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'first'}:{tmp_path / 'second'}")
    found = server_packages(Path(sys.executable))
    assert (found["xgrammar"], found["flashinfer-python"]) == ("0.2.1", "0.6.15")
