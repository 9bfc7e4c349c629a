"""What the speeds were measured on, and with what."""

import json
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.lib.ground.stage import RECORDED_VERSIONS, installed

DRIVER = re.compile(r"Kernel Module(?: for \S+)?\s+([\d.]+)")
# Behind the speed of a server; asked of its own interpreter.
SERVER_PACKAGES = ("sglang", "torch", "triton", "transformers", "sglang-kernel", "sgl-kernel", "flashinfer-python", "xgrammar")
# Of several copies the first on the path is the one that is imported, and the one that `version` finds.
LIST_PACKAGES = f"""
import json
from importlib import metadata
found = {{}}
for name in {SERVER_PACKAGES!r}:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def machine(runtime: Mapping[str, Any]) -> dict[str, Any]:
    """Processor, device, GPU with its driver, and threads."""
    device = str(runtime["device"])
    return {"cpu": cpu_name(), "device": device, "gpu": gpu_name(device), "driver": driver(device), "threads": runtime["threads"]}


def cpu_name() -> str:
    """The processor's name as Linux shows it, its architecture elsewhere."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def gpu_name(device: str) -> str | None:
    """The GPU's name, None on a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    return str(torch.cuda.get_device_name(device))


def driver(device: str) -> str | None:
    """The version of the GPU's driver, None on a CPU or where the kernel does not tell."""
    path = Path("/proc/driver/nvidia/version")
    found = DRIVER.search(path.read_text()) if device.startswith("cuda") and path.exists() else None
    return found[1] if found else None


def versions() -> dict[str, str]:
    """Versions of the packages behind the figures."""
    return {name: version for name in RECORDED_VERSIONS if (version := installed(name))}


def server_packages(python: Path) -> dict[str, str]:
    """Versions of the packages that a server with the interpreter `python` runs on."""
    asked = subprocess.run([str(python), "-c", LIST_PACKAGES], capture_output=True, text=True, check=True)
    packages: dict[str, str] = json.loads(asked.stdout.splitlines()[-1])
    return packages
