"""The plan of a run before its first answer: which rows, how many tokens, how many bytes, and whether they fit."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import Manifest, read_manifest
from scripts.lib.reporting.forecast import Estimate, Forecast, Limits, forecast
from scripts.lib.reporting.sampling import kept_by_kind, reasons_table, rows_table
from scripts.lib.reporting.scaling_page import expectation_table
from scripts.lib.reporting.scaling_study import read_growths
from scripts.lib.reporting.table import Table, number, size
from scripts.lib.reporting.training_memory import memory_section
from scripts.lib.states.storing import Storing, every_storing


def plan_page(prepared: Sequence[Path], target: Path, settings: Mapping[str, Any], free: int) -> str:
    """`plan.md` from the manifests of `prepare` and of the target; `free` is the number of bytes free where results go."""
    manifests = {path.parent.name: read_manifest(path, "prepare") for path in sorted(prepared, key=lambda path: path.parent.name)}
    forecasts = {path.parent.name: forecast_of(path, manifests[path.parent.name], settings) for path in prepared}
    kept = kept_by_kind(manifests)
    total = sum(forecasts.values(), Forecast())
    hidden_size = read_manifest(target, "target").facts["hidden_size"]
    hidden = settings["hidden"]
    storing = Storing(hidden["stored"], hidden["compression"])
    room = free if hidden["max_bytes"] is None else min(free, hidden["max_bytes"])
    parts = [
        f"# Plan of run {settings['run']}",
        f"{number(kept.total())} rows are kept: {number(kept['native'])} native and {number(kept['prompts'])} prompts.",
        "## Rows",
        "Raw rows are rejected, not sampled, or kept. Copies of a prompt in other datasets, and prompts that resemble one of a "
        "benchmark task, are taken out later, when the datasets are merged.",
        rows_table(manifests).markdown(),
        "## Rejected",
        reasons_table(manifests).markdown(),
        "## Tokens",
        "Answers are those that will be trained: written by the target, or there already in native rows. Expected: answers as long as "
        "those of the source. At most: every new answer at its limit, every row within encode.max_length. Prompts alone are counted.",
        token_table(forecasts, total).markdown(),
        "## Hidden states",
        f"Stored as {storing}: {number(storing.token_bytes(hidden_size))} bytes a token and "
        f"{number(storing.teacher_bytes(hidden_size))} more a trained token, H = {number(hidden_size)}.",
        state_table(total, hidden_size, storing, room).markdown(),
        rolling_verdict(total.expected, hidden_size, hidden, room)
        if hidden["mode"] == "rolling"
        else verdict(total, hidden_size, storing, room),
        *memory_section(target, settings, total.expected.trained / total.expected.tokens),
        *expectations(settings.get("scaling"), total.expected.trained),
    ]
    return "\n".join(f"{part.rstrip()}\n" for part in parts)


def expectations(study: str | None, tokens: float) -> list[str]:
    """What accept length the scaling study at `study` lets `tokens` trained tokens expect; StageError when it is not there."""
    if study is None:
        return []
    try:
        growths = read_growths(json.loads(Path(study).read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StageError(f"runtime.scaling: {study} is no scaling study ({error}); name report/scaling.json of a finished run") from error
    return [
        "## Accept length to expect",
        f"By the drafters of `{study}`, for {number(tokens)} trained tokens (expected) and the data, target and recipe of that run.",
        expectation_table(growths, tokens).markdown(),
    ]


def forecast_of(path: Path, manifest: Manifest, settings: Mapping[str, Any]) -> Forecast:
    """The forecast of one dataset under the run's settings."""
    generate = settings["generate"]
    limits = Limits(generate["turns"], generate["max_tokens"][manifest.facts["partition"]], settings["encode"]["max_length"])
    return forecast(manifest, path.parent, limits)


def token_table(forecasts: Mapping[str, Forecast], total: Forecast) -> Table:
    """Tokens of each dataset, and their sums."""
    header = ["dataset", "rows", "answers", "prompt tokens", "tokens, expected", "of them trained", "tokens, at most", "trained, at most"]
    lines = [
        [
            name,
            *(number(value) for value in (one.rows, one.answers, one.prompt_tokens)),
            *(number(value) for value in (one.expected.tokens, one.expected.trained, one.at_most.tokens, one.at_most.trained)),
        ]
        for name, one in [*sorted(forecasts.items()), ("all", total)]
    ]
    return Table(header, lines, ("dataset",))


def state_table(total: Forecast, hidden_size: int, storing: Storing, room: int) -> Table:
    """Bytes of the hidden states beside those that there is room for."""
    estimates: dict[str, Estimate] = {"expected": total.expected, "at most": total.at_most}
    lines = [
        [name, number(one.tokens), number(one.trained), size(one.state_bytes(hidden_size, storing)), size(room)]
        for name, one in estimates.items()
    ]
    return Table(["estimate", "tokens", "trained tokens", "hidden states", "room"], lines, ("estimate",))


def verdict(total: Forecast, hidden_size: int, storing: Storing, room: int) -> str:
    """In words: is there room for the hidden states, and stored how would there be?"""
    expected, at_most = (one.state_bytes(hidden_size, storing) for one in (total.expected, total.at_most))
    if at_most <= room:
        return "They fit, even at most."
    if expected <= room:
        return "They fit if answers are as long as expected, not if all reach their limit."
    fitting = [other for other in every_storing() if total.expected.state_bytes(hidden_size, other) <= room]
    stored = "".join(f" store them as `{other}` ({size(total.expected.state_bytes(hidden_size, other))})," for other in fitting)
    return (
        f"**They do not fit**:{stored} lower `samples`, `generate.max_tokens` or `encode.max_length`, or give results/ a larger disk "
        "and `hidden.max_bytes` a larger value."
    )


def rolling_verdict(expected: Estimate, hidden_size: int, hidden: Mapping[str, Any], room: int) -> str:
    """In words: is there room for shards that come and go? Two must be there at a time: one is trained on while the next is dumped."""
    storing, tokens = Storing(hidden["stored"], hidden["compression"]), hidden["tokens_per_shard"]
    shard = storing.state_bytes(tokens, tokens * expected.trained / expected.tokens, hidden_size)
    if 2 * shard > room:
        return (
            f"**They do not fit**, although they come and go: two shards of {number(tokens)} tokens are {size(2 * shard)}. Lower "
            "`hidden.tokens_per_shard`, or give results/ a larger disk and `hidden.max_bytes` a larger value."
        )
    again = (
        "All of them fit, and are dumped once."
        if expected.state_bytes(hidden_size, storing) <= room
        else (f"About {number(int(room / shard))} of them are there at a time; what does not fit is dumped again in each epoch.")
    )
    return f"They come and go while a drafter is trained, in shards of {size(shard)}. {again}"


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk that `folder` lies on."""
    return shutil.disk_usage(folder).free
