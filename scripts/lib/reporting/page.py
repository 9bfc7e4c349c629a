"""The pages of the report: Markdown for the repository, one HTML file that holds everything."""

import html
from collections.abc import Mapping, Sequence

import yaml

from scripts.lib.reporting.benchmarks import CAPTIONS, Benchmarks
from scripts.lib.reporting.cells import Cell, is_baseline, machines, servers, targets
from scripts.lib.reporting.columns import (
    COLUMNS,
    FURTHER,
    LATENCY,
    RESULTS,
    SERVED,
    cell_table,
    lossless_summary,
    measured_words,
    title,
    value,
)
from scripts.lib.reporting.plan import cost_table, data_table, dataset_rows, rejected_table
from scripts.lib.reporting.published import Run
from scripts.lib.reporting.sampling import rows_table
from scripts.lib.reporting.scaling_page import scaling_section
from scripts.lib.reporting.scaling_study import Study
from scripts.lib.reporting.style import CSS, SCRIPT
from scripts.lib.reporting.table import Table, number
from scripts.lib.reporting.tables import CHECK_HINTS, SETTING_HINTS, best_classes, checks_table, settings_table
from scripts.lib.reporting.verdict import Leader
from scripts.lib.reporting.wording import next_variants, remarks, stanza, verdict_words_by_concurrency

MEANINGS = COLUMNS | FURTHER
MODEL = (
    "The cost model: a cycle costs its overhead, its drafts, and the check of its draft tokens by the target. It is fitted for each "
    "drafter, machine and concurrency on all tasks, in decoding steps of the target alone, and joined with the acceptance by position of "
    "the next longer chain that was measured; intervals hold 95 %, from the misfit and from the spread of the cells. Chains shorter than "
    "all measured are only bounded: they cost no more than the shortest, and no less than on the line from it to the target alone. Of "
    "longer ones nothing is said."
)
FEW_NOTES = 24
NEXT = "What may be faster still, for the next run to confirm; add to the config:"


def benchmark_markdown(run: str, found: Benchmarks) -> str:
    """`benchmark.md`: verdict and table, whether outputs are the same, how it was measured and what each column means."""
    variants, verdicts = next_variants(found.verdicts), verdict_words_by_concurrency(found.leaders, found.verdicts)
    parts = [
        f"# Benchmark of run {run}\n",
        "".join(f"- {size}: {leader}\n" for size, (leader, _) in verdicts.items()),
        cell_table(found.rows).markdown(),
        "All of this as a page with plots and sortable tables: [benchmark.html](benchmark.html). "
        "All columns: [benchmark.csv](benchmark.csv).\n",
        "## Verdict\n",
        "".join(f"- {size}, {sentence}\n" for size, (_, sentences) in verdicts.items() for sentence in sentences),
        settings_table(found.verdicts).markdown(),
        f"{MODEL}\n",
        *([f"{NEXT}\n", f"```yaml\n{stanza(variants)}```\n"] if variants else []),
        "## Variants\n",
        cell_table(one_a_variant(found.rows), SERVED).markdown(),
        "## Lossless?\n",
        lossless_summary(found.cells) + "\n",
        *(["## What the doctor remarks\n", "".join(f"- {remark}\n" for remark in remarks(found.cells))] if remarks(found.cells) else []),
        "## How it was measured\n",
        "".join(f"- {sentence}\n" for sentence in measured_words(found.cells)),
        "".join(f"- {line}.\n" for line in [*targets(found.cells), *machines(found.cells)]),
        "## Columns\n",
        "".join(f"- `{name}`: {meaning}.\n" for name, meaning in MEANINGS.items()),
    ]
    return "\n".join(parts)


def one_a_variant(rows: Sequence[Cell]) -> list[Cell]:
    """The first row of each variant."""
    return list({row["variant"]: row for row in reversed(rows)}.values())[::-1]


def plan_markdown(run: Run) -> str:
    """`plan.md`: what became of every row, and what each stage took."""
    return "\n".join(part for title, text, table in plan_parts(run) for part in (title, text + "\n", table.markdown()))


def plan_parts(run: Run) -> list[tuple[str, str, Table]]:
    """Title, explanation and table of each part of the plan."""
    return [
        (
            f"# Plan of run {run.name}\n\n## Data\n",
            "Rows of each dataset after each stage. Responses are assistant turns that the target wrote; several turns may share a "
            "token row. Tokens, trained tokens (those that the target generated) and held-out rows are of the mix.",
            data_table(dataset_rows(run)),
        ),
        (
            "## Taken\n",
            "What `prepare` made of the raw rows: rejected, not sampled, or kept.",
            rows_table({part.name: part.manifest for part in run.parts["prepared"]}),
        ),
        (
            "## Left out\n",
            "Every row that a stage took and did not pass on, by reason. Stages count rows, turns or files.",
            rejected_table(run),
        ),
        (
            "## Cost\n",
            "Seconds of each job on its own; jobs may have run side by side. Rates are rows in and tokens over these seconds, loading "
            "included. A resumed job shows its last attempt.",
            cost_table(run),
        ),
    ]


def page(run: Run, found: Benchmarks, study: Study | None, plots: Mapping[str, str]) -> str:
    """`benchmark.html`: one file without anything outside it. `plots` are those of the run besides the benchmark's."""
    captions = {
        "training": "Training of each drafter. The simulated accept length walks held-out rows cycle by cycle, as serving does.",
        "rows": "Rows of each dataset after each stage, on a logarithmic scale.",
    }
    meanings = "".join(f"<div><dt>{title(name)}</dt><dd>{html.escape(text)}.</dd></div>" for name, text in MEANINGS.items())
    cards = {
        "Verdict": verdict_card(found),
        "Results": results(found),
        "Plots": "".join(figure(plot, CAPTIONS[name]) for name, plot in found.plots.items()),
        "Settings": settings_card(found),
        **({"Latency": latencies(found)} if any(value(row, "ttft_p50_ms") is not None for row in found.rows) else {}),
        "Variants": cell_table(one_a_variant(found.rows), SERVED).html([MEANINGS[name] for name in SERVED]),
        "What the figures mean": f"<dl>{meanings}</dl>",
        "How it was made": how_made(run, found),
        **scaling_section(study),
        "Training": figure(plots["training"], captions["training"]),
        "Rows": figure(plots["rows"], captions["rows"]),
        **{name.rpartition("## ")[2].strip(): paragraph(text) + table.html() for name, text, table in plan_parts(run)},
    }
    links = "".join(f'<a href="#{anchor(name)}">{html.escape(name)}</a>' for name in cards)
    body = [
        f"<h1>Benchmark of run {html.escape(run.name)}</h1>",
        '<p class="soft">Drafters against the target alone. Click a column to sort by it; rest on it, or on a mark, to see what it is.</p>',
        f"<nav>{links}</nav>",
        tiles(run, found),
        *(card(name, content) for name, content in cards.items()),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(run.name)}: benchmark</title>'
    top = f'<!doctype html>\n<html lang="en"><head>{head}<style>{CSS}</style></head>\n<body><main>\n'
    return f"{top}{''.join(body)}</main><script>{SCRIPT}</script></body></html>\n"


def verdict_card(found: Benchmarks) -> str:
    """Which variant to serve at each concurrency, what the cost model says of each drafter, and what to measure next."""
    parts = [
        f"<h3>{size}</h3><p><b>{html.escape(leader)}</b></p><ul>{''.join(f'<li>{html.escape(one)}</li>' for one in sentences)}</ul>"
        for size, (leader, sentences) in verdict_words_by_concurrency(found.leaders, found.verdicts).items()
    ]
    variants = next_variants(found.verdicts)
    following = f"{paragraph(NEXT)}<pre>{html.escape(stanza(variants))}</pre>" if variants else ""
    return "".join(parts) + following


def results(found: Benchmarks) -> str:
    """The table, whether outputs are the same, and the notes, which are too long for a cell of it."""
    kinds = ["alone" if is_baseline(row) else "gain" if (row["speedup"] or 0) >= 1 else "loss" for row in found.rows]
    known = [name for name in RESULTS if any(value(row, name) is not None for row in found.rows)]
    table = cell_table(found.rows, known).html([MEANINGS[name] for name in known], kinds, title("speedup"))
    columns = ("task", "variant", "concurrency", "notes")
    noted = [row for row in found.rows if row["notes"]]
    notes = cell_table(noted, columns).html([MEANINGS[name] for name in columns])
    lossless = f"<p><b>Lossless?</b> {html.escape(lossless_summary(found.cells))}</p>"
    remarked = "".join(f"<li>{html.escape(remark)}</li>" for remark in remarks(found.cells))
    lossless += f"<p><b>The doctor remarks</b></p><ul>{remarked}</ul>" if remarked else ""
    opened = " open" if len(noted) <= FEW_NOTES else ""
    return f"{table}{lossless}<details{opened}><summary>Notes on {len(noted)} rows</summary>{notes}</details>"


def settings_card(found: Benchmarks) -> str:
    """What the cost model expects of every chain, and how far it was right where that was measured."""
    table = settings_table(found.verdicts).html(list(SETTING_HINTS.values()), best_classes(found.verdicts))
    checked = "<h3>Expected and measured</h3>" + paragraph(
        "Each length of chain was left out of the fit in turn, then compared with its cells."
    )
    checks = checks_table(found.checks).html(list(CHECK_HINTS.values()))
    return f"{paragraph(MODEL)}{table}" + (checked + checks if found.checks else "")


def latencies(found: Benchmarks) -> str:
    """Times to the first token and between tokens."""
    kinds = ["alone" if is_baseline(row) else "other" for row in found.rows]
    return cell_table(found.rows, LATENCY).html([MEANINGS[name] for name in LATENCY], kinds)


def how_made(run: Run, found: Benchmarks) -> str:
    """How cells were measured and on what, the command, and the settings of every stage."""
    items = [*measured_words(found.cells), *(f"{line}." for line in [*targets(found.cells), *machines(found.cells)])]
    sentences = "".join(f"<li>{html.escape(text)}</li>" for text in items)
    commands = "\n".join([f"snakemake results/{run.name}/report/benchmark.md", *servers(found.cells)])
    settings: dict[str, dict[str, object]] = {}
    for stage, part in run:
        settings.setdefault(stage, {})[part.name or "all"] = part.manifest.settings
    text = yaml.safe_dump(settings, sort_keys=False)
    config = f"<details><summary>Config, by stage</summary><pre>{html.escape(text)}</pre></details>"
    return f"<ul>{sentences}</ul><h3>Commands</h3><pre>{html.escape(commands)}</pre>{config}"


def best_gain(leaders: Sequence[Leader]) -> list[tuple[str, str]]:
    """The tile of the best speed-up over all tasks, if speeds are known: that of one cell may be over a target that was held up."""
    best = max(leaders, key=lambda leader: leader.gain.value, default=None)
    if best is None:
        return []
    return [
        (f"{number(best.gain.value, 2)} ×", f"the target alone at its fastest: {best.variant}, concurrency {best.concurrency}, all tasks")
    ]


def tiles(run: Run, found: Benchmarks) -> str:
    """The few figures that a reader looks for first."""
    longest = max(found.cells, key=lambda cell: cell["accept_length"] or 0.0)
    mixed = dataset_rows(run)
    shown = [
        *best_gain(found.leaders),
        (number(longest["accept_length"], 2), f"best accept length of {longest['ceiling']}: {longest['task']}, {longest['variant']}"),
        (
            f"{sum(cell['identical'] for cell in found.cells)} of {sum(cell['prompts'] for cell in found.cells)}",
            "outputs identical to the target's own",
        ),
        (number(sum(row.trained_tokens for row in mixed)), f"trained tokens in {sum(row.rows['merged'] or 0 for row in mixed):,} rows"),
    ]
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{value}</b><span>{html.escape(text)}</span></div>' for value, text in shown)
        + "</div>"
    )


def card(name: str, content: str) -> str:
    """A section with its title."""
    return f'<h2 id="{anchor(name)}">{html.escape(name)}</h2>\n<section class="card">{content}</section>\n'


def anchor(name: str) -> str:
    """The id of a section."""
    return name.lower().replace(" ", "-")


def figure(plot: str, caption: str) -> str:
    """A plot with its caption."""
    return f"<figure>{plot}<figcaption>{html.escape(caption)}</figcaption></figure>"


def paragraph(words: str) -> str:
    """A paragraph."""
    return f"<p>{html.escape(words)}</p>"
