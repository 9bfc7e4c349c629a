"""Say why a drafter does not work: known misconfigurations of its files, of a server's command line, and of a server that runs.

The command line of a server may follow after --: its --model-path and --speculative-draft-model-path then say which folders to look at.
Exit status 1 when something is found that makes every figure wrong.
"""

import argparse
import sys
from pathlib import Path

from scripts.lib.doctor.command import Case, case_of, examine, table
from scripts.lib.ground.stage import guarded


def main() -> None:
    """Parse the arguments, look, and print the findings."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    arguments, command = parser().parse_args(words[:end]), words[end + 1 :]
    guarded("doctor", lambda: look(arguments, command))


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    found = argparse.ArgumentParser(prog="python -m scripts.doctor", description=__doc__)
    found.add_argument("--target", type=Path, metavar="DIR", help="the target in HF layout")
    found.add_argument("--drafter", type=Path, metavar="DIR", help="the drafter as SGLang loads it")
    found.add_argument("--training", type=Path, metavar="FILE", help="manifest.json of its training, if it does not lie beside the drafter")
    found.add_argument("--url", help="a server that runs: its report, tokenizer and template are compared, and a canary asks for tokens")
    found.add_argument("--walk", metavar="DEVICE", nargs="?", const="cpu", help="load the target here and walk chains")
    found.add_argument("--rows", type=Path, metavar="FILE", help="token rows to walk, such as merged/eval-00000.parquet, not six questions")
    return found


def look(arguments: argparse.Namespace, command: list[str]) -> None:
    """Print what is found; exit status 1 for a fatal finding."""
    target, drafter, algorithm, flags = case_of(arguments.target, arguments.drafter, command)
    findings = examine(Case(target, drafter, algorithm, flags, arguments.training, arguments.url, arguments.walk, arguments.rows))
    print(table(findings))
    if any(finding.fatal for finding in findings):
        sys.exit(1)


if __name__ == "__main__":
    main()
