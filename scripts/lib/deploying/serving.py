"""The shell scripts beside a drafter: one serves it, one checks the server."""

import shlex
from collections.abc import Iterator, Sequence

from scripts.lib.deploying.choosing import Choice
from scripts.lib.reporting.cells import Cell

TRAINING = "training-manifest.json"  # that of stage train: manifest.json is stage deploy's own
WRAP = " \\\n    "
# What belongs to the place where it was measured: paths, the address, and the memory that two servers shared.
LOCAL = ("--model-path", "--speculative-draft-model-path", "--host", "--port", "--mem-fraction-static")


def measured_flags(cell: Cell) -> list[str]:
    """SGLang's flags for the setting of `cell`: those of the server that was measured or, where none was, those of the chain alone."""
    command = (cell["server"] or {}).get("command")
    if command:
        first = next(place for place, word in enumerate(command) if word.startswith("--"))
        return list(without(command[first:], LOCAL))
    flags = ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", str(cell["draft_steps"])]
    return [*flags, "--speculative-eagle-topk", str(cell["topk"]), "--speculative-num-draft-tokens", str(cell["draft_tokens"])]


def without(flags: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """`flags` without those called `names` and their values."""
    dropping = False
    for word in flags:
        if word.startswith("--"):
            dropping = word in names
        if not dropping:
            yield word


def serve_script(chosen: Choice, target: str) -> str:
    """`serve.sh`: the server of the best measured setting. `target` is the target's folder as seen from the script's own."""
    version = chosen.cell["versions"].get("sglang")
    measured = f"SGLang {version}" if version else "the reference loop of this pipeline, not SGLang"
    warning = "" if chosen.pays else f"echo {shlex.quote(refusal(chosen))} >&2\n"
    flags = WRAP.join(paired(measured_flags(chosen.cell)))
    return f"""#!/bin/sh
# Serves the target with this drafter: serve.sh [TARGET [flags of SGLang …]]
# Flags of variant {chosen.cell["variant"]}, measured in {measured}. PYTHON names the interpreter that has SGLang.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${{1:-"$here/{target}"}}
[ $# -eq 0 ] || shift
{warning}exec "${{PYTHON:-python}}" -m sglang.launch_server \\
    --model-path "$target" \\
    --speculative-draft-model-path "$here" \\
    {flags} \\
    "$@"
"""


def refusal(chosen: Choice) -> str:
    """One line for whoever starts a server that does not pay."""
    return f"no measured setting pays: {chosen.speedup:.2f} times the target alone, break-even at accept length {chosen.break_even:.2f}"


def paired(flags: Sequence[str]) -> list[str]:
    """Each flag with its values on one line; of a flag that is set twice the last, which is the one that a server takes."""
    lines: dict[str, str] = {}
    name = ""
    for flag in flags:
        if flag.startswith("--") or not lines:
            name = flag.partition("=")[0]
            lines.pop(name, None)
            lines[name] = flag
        else:
            lines[name] += f" {shlex.quote(flag)}"
    return list(lines.values())


def check_script() -> str:
    """`check.sh`: asks a running server whether it serves this drafter as it was trained."""
    return """#!/bin/sh
# Checks a server that runs this drafter: check.sh [URL [TARGET]]
# AERIE names the checkout of aerie, PYTHON its interpreter.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cd "${AERIE:-"$here/../../.."}"
exec "${PYTHON:-python}" -m scripts.check_served --url "${1:-http://127.0.0.1:30000}" --drafter "$here" ${2:+--target "$2"}
"""
