"""A small valid wheel in a folder that pip is told to look in, and nowhere else."""

import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest


def write_wheel(folder: Path, name: str, version: str, files: Mapping[str, bytes]) -> Path:
    """Write the wheel NAME-VERSION with `files` into `folder`."""
    info = f"{name}-{version}.dist-info"
    extra = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in {**files, **extra}.items():
            archive.writestr(member, data)
    return path


def only_from(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Point pip at `folder` alone."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
