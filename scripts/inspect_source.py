"""Look at a source before it is in the config, and propose the config entry that reads it.

python -m scripts.inspect_source path:chats.jsonl --apply
python -m scripts.inspect_source hub:ORG/NAME --split train --target results/demo/target
"""

import argparse
import json
import tempfile
from pathlib import Path

from scripts.lib.ground.stage import guarded
from scripts.lib.inspecting.inspecting import inspect
from scripts.lib.inspecting.sampling import Size
from scripts.lib.sources.settings import Address, SourceSettings


def main() -> None:
    """Parse the command line and print the page."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.inspect_source", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="hub:ORG/NAME, path:FILE_OR_GLOB, wheel:NAME==VERSION or generator:NAME==VERSION")
    for name, text in (("revision", "commit, branch or tag"), ("subset", "configuration"), ("split", "split")):
        parser.add_argument(f"--{name}", help=f"{text} of a hub dataset")
    for name, text in (("members", "read"), ("exclude", "leave out")):
        parser.add_argument(f"--{name}", nargs="+", default=[], help=f"globs of files to {text}")
    parser.add_argument("--generator", type=json.loads, help='what a generator: source makes: {"tasks": […], "size": N}')
    parser.add_argument("--target", type=Path, help="folder of a target in HF layout: lengths in its tokens instead of characters")
    parser.add_argument("--apply", action="store_true", help="show the rows and rejections that the proposed entry gives")
    for name, text in (("head", "first records"), ("sample", "records drawn from the rest"), ("limit", "records to read at most")):
        parser.add_argument(f"--{name}", type=int, default=getattr(Size, name), help=f"{text} (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=Size.seed, help="seed of the draw (default: %(default)s)")
    arguments = parser.parse_args()
    guarded("inspect_source", lambda: look(arguments))


def look(arguments: argparse.Namespace) -> None:
    """Print the page for the parsed command line."""
    settings = SourceSettings(
        Address.of(arguments.source),
        "source",
        arguments.seed,
        tuple(arguments.members),
        tuple(arguments.exclude),
        arguments.revision,
        arguments.subset,
        arguments.split,
        arguments.generator,
    )
    size = Size(arguments.head, arguments.sample, arguments.limit, arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        print(inspect(settings, size, Path(folder), arguments.target, arguments.apply))


if __name__ == "__main__":
    main()
