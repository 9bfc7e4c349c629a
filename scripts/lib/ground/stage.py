"""The frame around every stage: arguments, work folder, manifest, publishing, and the last line of the log."""

import argparse
import errno
import json
import logging
import platform
import resource
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import canonical, check_one_disk, claimed, publish, sha256_file, sha256_text, write_json
from scripts.lib.ground.manifest import NAME, Manifest
from scripts.lib.ground.provenance import code

log = logging.getLogger("aerie")
COST = "cost.json"
RECORDED_VERSIONS = ("torch", "transformers", "datasets", "polars", "safetensors", "tokenizers", "sglang")


@dataclass(frozen=True)
class Job:
    """What one run of a stage is asked to do.

    `output` is the folder that it publishes, `inputs` the manifests that it reads, by flag. Those in `consulted` are read too,
    but only decide about what is read from `inputs`: the manifest does not name them, so that where they change no decision they
    change no byte.
    `settings` is tracked: it decides the bytes. `runtime` is not: it decides where and how fast.
    """

    stage: str
    output: Path
    inputs: Mapping[str, Sequence[Path]]
    settings: Mapping[str, Any]
    runtime: Mapping[str, Any] = field(default_factory=dict)
    work: Path = Path("results/work")
    consulted: Mapping[str, Sequence[Path]] = field(default_factory=dict)

    def input(self, name: str) -> Path:
        """The only manifest given under flag `name`."""
        (path,) = self.inputs[name]
        return path

    def input_digests(self) -> dict[str, str]:
        """Path to sha256 of every manifest that the stage's own manifest names."""
        return digests(self.inputs)

    def fingerprint(self) -> str:
        """Names the work folder: a resumed job finds its own partial work and never that of other settings or code."""
        parts = [self.stage, str(self.output), canonical(dict(self.settings)), canonical(self.input_digests())]
        parts += [canonical(digests(self.consulted))] if self.consulted else []
        return sha256_text("\n".join([*parts, canonical(code(f"scripts/{self.stage}.py"))]))[:16]


def digests(manifests: Mapping[str, Sequence[Path]]) -> dict[str, str]:
    """Path to sha256 of every manifest of `manifests`."""
    return {str(path): sha256_file(path) for paths in manifests.values() for path in paths}


@dataclass(frozen=True)
class Result:
    """What a stage hands back: its manifest, and `cost` figures beyond seconds and memory."""

    manifest: Manifest
    cost: Mapping[str, Any] = field(default_factory=dict)


Build = Callable[[Job, Path], Result]


def run(job: Job, build: Build) -> None:
    """Let `build` fill the work folder, write the manifest last, and publish by rename.

    A folder whose manifest is there was finished by an earlier attempt and is only published. Where the same work is published already,
    nothing is done: Snakemake starts every job below one that ran, also when that one gave the bytes that it had given before.
    """
    fingerprint = job.fingerprint()
    if published(job.output, fingerprint):
        log.info("unchanged %s: settings, code and inputs are those that it was made of", job.output)
        return
    folder = job.work / job.stage / fingerprint
    check_one_disk(folder, job.output)
    resumed = folder.exists()
    with claimed(folder):
        if not (folder / NAME).exists():
            start = time.monotonic()
            result = build(job, folder)
            for leftover in ("progress.json", "partial"):
                remove(folder / leftover)
            sizes = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
            made = {"fingerprint": fingerprint, "files": sizes, "manifest": result.manifest.digest()}
            write_json(folder / COST, cost(result, time.monotonic() - start, resumed) | made)
            result.manifest.write(folder)
        publish(folder, job.output)
    log.info("published %s", job.output)


def published(output: Path, fingerprint: str) -> bool:
    """Whether `output` holds the whole result of the work that `fingerprint` names; its files are made as new as such work would be.

    Snakemake may have put an older manifest over it: when a job fails after this one had published.
    """
    if not (output / NAME).exists() or not (output / COST).exists():
        return False
    made = json.loads((output / COST).read_text())
    files = {output / name: size for name, size in made.get("files", {}).items()}
    if (made.get("fingerprint"), made.get("manifest")) != (fingerprint, sha256_file(output / NAME)):
        return False
    if any(not path.is_file() or path.stat().st_size != size for path, size in files.items()):
        return False
    for path in (*files, output / COST, output / NAME):
        path.touch()
    return True


def remove(path: Path) -> None:
    """Delete the file or folder at `path` if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def cost(result: Result, seconds: float, resumed: bool) -> dict[str, Any]:
    """What the work took: seconds of this attempt, peak memory, machine and versions, and the stage's own figures."""
    versions = {name: version for name in RECORDED_VERSIONS if (version := installed(name))}
    return {
        "seconds": round(seconds, 3),
        "resumed": resumed,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "python": platform.python_version(),
        "versions": versions,
        **result.cost,
    }


def installed(name: str) -> str | None:
    """The version of the installed package `name`, None when it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def stage_command(stage: str, doc: str, build: Build, inputs: Sequence[str] = (), consulted: Sequence[str] = ()) -> None:
    """Parse the command line of `python -m scripts.<stage>` and run the stage.

    Each name in `inputs` and `consulted` becomes a flag that takes the manifests of the stage before.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m scripts.{stage}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in (*inputs, *consulted):
        parser.add_argument(f"--{name}", type=Path, nargs="*", required=True, help=f"manifest of {name}")
    parser.add_argument("--output", type=Path, required=True, help="manifest to write; the folder that holds it is published")
    parser.add_argument("--settings", type=json.loads, default={}, help="tracked settings as JSON")
    parser.add_argument("--runtime", type=json.loads, default={}, help="machine settings as JSON, never tracked")
    parser.add_argument("--work", type=Path, default=Path("results/work"), help="root of the work folders, on the output's file system")
    arguments = parser.parse_args()
    given = vars(arguments)
    job = Job(
        stage=stage,
        output=arguments.output.parent,
        inputs={name: tuple(given[name.replace("-", "_")]) for name in inputs},
        settings=arguments.settings,
        runtime=arguments.runtime,
        work=arguments.work,
        consulted={name: tuple(given[name.replace("-", "_")]) for name in consulted},
    )
    below_the_run = job.output.parts[3:]  # results/<run>/<folder>/…
    guarded("/".join([stage, *below_the_run]), lambda: run(job, build))


def guarded(label: str, action: Callable[[], None]) -> None:
    """Run `action` with logging to stderr; on failure the last line says in one sentence what to do, and exit with 1."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {label}: %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    try:
        action()
    except StageError as error:
        log.error("ERROR %s", " ".join(str(error).split()))
        sys.exit(1)
    except Exception as error:
        if not disk_is_full(error):
            log.exception("unexpected error, please report it with this log")
        log.error("ERROR %s", last_words(error))
        sys.exit(1)


def disk_is_full(error: BaseException) -> bool:
    """Whether `error` says that the disk, a quota or a file size limit is used up, also through a library's own type."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return (isinstance(error, OSError) and error.errno in full) or "No space left on device" in str(error)


def last_words(error: Exception) -> str:
    """One line for an error that no stage foresaw."""
    if disk_is_full(error):
        name = getattr(error, "filename", None)
        where = f" while writing {name}" if name else ""
        free = shutil.disk_usage(".").free
        remedy = "free some space and start again, finished work is kept"
        return f"the disk is full{where} ({free:,} bytes free here): {remedy} ({one_line(error)})"
    return f"{type(error).__name__}: {one_line(error)}"


def one_line(error: BaseException) -> str:
    """The text of `error` without line breaks, at most 300 characters."""
    return " ".join(str(error).split())[:300]
