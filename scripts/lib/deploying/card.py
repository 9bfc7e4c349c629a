"""README.md of a drafter's folder: what it is for, what it was made of, what it reached, where it ends."""

from collections.abc import Mapping, Sequence
from typing import Any

from scripts.lib.deploying.choosing import Choice, verdict
from scripts.lib.reporting.cells import Cell
from scripts.lib.reporting.plan import DatasetRows, dataset_rows
from scripts.lib.reporting.published import Published, Run
from scripts.lib.reporting.table import Table, number

USE = """```
./serve.sh [TARGET] [flags …]   # SGLang, with the flags measured best
./check.sh [URL] [TARGET]       # is it served as it was trained?
```"""
RECIPE = (
    *("epochs", "fraction", "batch_tokens", "optimizer", "learning_rate", "ttt_steps", "ttt_decay", "loss", "precision"),
    *("layers", "intermediate_size", "fc_norm", "norm_output", "warm_start", "start_from"),
)


def card(run: Run, drafter: Published, cells: Sequence[Cell], chosen: Choice) -> str:
    """The whole page."""
    target = run.one("target").manifest.facts
    name = f"{target['source']}{', ' + target['member'] if target.get('member') else ''}"
    parts = [
        f"# EAGLE-3 drafter `{drafter.name}` for {target['architecture']} ({name})",
        f"Trained in run `{run.name}`. {verdict(chosen)}",
        "## Use",
        USE,
        "## Data",
        f"{share(drafter)} of the training conversations of this mix. {answers(run)}",
        mix_table(dataset_rows(run)).markdown(),
        "## Licences",
        "".join(f"- {line}\n" for line in licence_lines(dataset_rows(run))),
        "## Training",
        training_table(drafter).markdown(),
        "## Measured",
        "Tokens a second of the target alone and with this drafter on the same prompts, in turns; accept length counts the bonus token.",
        measured_table([cell for cell in cells if cell["drafter"] == drafter.name]).markdown(),
        "## Limits",
        "".join(f"- {line}\n" for line in limits(run, drafter)),
    ]
    return "\n".join(f"{part.rstrip()}\n" for part in parts)


def share(drafter: Published) -> str:
    """How much of the mix the drafter saw."""
    fraction = drafter.manifest.settings["drafter"].get("fraction", 1.0)
    return "All" if fraction == 1 else f"{fraction:.0%}"


def answers(run: Run) -> str:
    """Who wrote the answers, and how."""
    ways = {(made["temperature"], made["max_tokens"]["short"]) for made in generate_settings(run)}
    written = " and ".join(f"at temperature {temperature:g} with up to {tokens} tokens" for temperature, tokens in sorted(ways))
    return f"The target wrote the answers of datasets of prompts itself, {written}." if written else "All answers are the datasets' own."


def generate_settings(run: Run) -> list[Mapping[str, Any]]:
    """The settings under which the target answered."""
    return [part.manifest.settings["generate"] for part in run.parts["responses"] if "generate" in part.manifest.settings]


def mix_table(datasets: Sequence[DatasetRows]) -> Table:
    """The data mix by dataset."""
    total = sum(row.trained_tokens for row in datasets) or 1
    lines = [
        [row.name, row.source, number(row.rows["merged"]), number(row.trained_tokens), f"{row.trained_tokens / total:.1%}"]
        for row in datasets
    ]
    return Table(["dataset", "source", "rows", "trained tokens", "share"], lines, ("dataset", "source"))


def licence_lines(datasets: Sequence[DatasetRows]) -> list[str]:
    """The licence of each dataset's prompts, as the config states it."""
    by_licence: dict[str, list[str]] = {}
    for row in datasets:
        by_licence.setdefault(row.licence, []).append(row.name)
    return [f"{licence}: {', '.join(names)}" for licence, names in sorted(by_licence.items())]


def training_table(drafter: Published) -> Table:
    """The recipe and what it came to on held-out rows."""
    recipe, final = drafter.manifest.settings["drafter"], drafter.manifest.facts["final"]
    weights = next(shard for shard in drafter.manifest.shards if shard.name == "model.safetensors")
    lines = [[name.replace("_", " "), str(recipe[name])] for name in RECIPE if recipe.get(name) is not None]
    lines += [["training rows", number(weights.rows)], ["trained tokens an epoch", number(weights.tokens)]]
    lines += [["optimizer steps", number(drafter.manifest.facts["steps"])]]
    lines += [["held-out accuracy by draft step", ", ".join(f"{value:.3f}" for value in final["accuracies"])]]
    lines += [["held-out accept length, simulated", number(final["accept_length_all"], 3)]]
    return Table(["what", "value"], lines, ("what", "value"))


def measured_table(cells: Sequence[Cell]) -> Table:
    """The cells of the drafter."""
    figures = (("baseline_tok_s", 1), ("tok_s", 1), ("speedup", 2), ("accept_length", 2), ("break_even_accept_length", 2))
    lines = [
        [cell["task"], cell["variant"], number(cell["concurrency"]), number(cell["prompts"])]
        + [number(cell[name], digits) for name, digits in figures]
        for cell in cells
    ]
    header = ["task", "variant", "concurrency", "prompts", "tok/s alone", "tok/s with drafter", "speed-up", "accept length", "break-even"]
    return Table(header, lines, ("task", "variant"))


def limits(run: Run, drafter: Published) -> list[str]:
    """What the figures do not promise."""
    target, vocabulary = run.one("target").manifest.facts, run.one("vocab").manifest.facts
    lengths = {part.manifest.settings["encode"]["max_length"] for part in run.parts["tokens"] if "encode" in part.manifest.settings}
    covered = vocabulary.get("coverage", {}).get("eval")
    layers = ", ".join(map(str, drafter.manifest.facts["boundaries"]))
    lines = [
        f"It serves this one target (chat template {target['chat_template_sha256'][:12]}…, hidden size {target['hidden_size']}) and no "
        f"other, from the states that enter its layers {layers}.",
        "Accept length and speed-up hold for prompts like those measured, on the machine and versions measured; greedy answers are "
        "easier to draft than sampled ones.",
        "A drafter changes no answer at temperature 0 beyond the noise of the arithmetic: the target checks every token.",
    ]
    lines += [f"Rows longer than {max(lengths):,} tokens were cut in training; longer contexts are untested."] if lengths else []
    if covered is not None:
        lines.append(
            f"It drafts {vocabulary['size']:,} of {vocabulary['target_size']:,} tokens, {covered:.1%} of those in held-out answers."
        )
    return lines
