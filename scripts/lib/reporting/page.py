"""The pages of the report: Markdown for the repository, one HTML file that holds everything."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.lib.reporting.cells import COLUMNS, MEASURED, cell_table, lossless_summary, machines
from scripts.lib.reporting.plan import cost_table, data_table, dataset_rows, rejected_table
from scripts.lib.reporting.published import Run
from scripts.lib.reporting.sampling import rows_table
from scripts.lib.reporting.table import Table, number

Cells = Sequence[Mapping[str, Any]]

CSS = """
:root { color-scheme: light; --ink: #1f2933; --soft: #5f6c7b; --line: #dfe5ec; --back: #f6f8fa; --accent: #0072b2; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 28px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 36px 0 10px; }
p, li { max-width: 80ch; } .soft { color: var(--soft); }
section.card { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; margin: 14px 0; }
dl { columns: 2 420px; column-gap: 32px; } dl div { break-inside: avoid; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 18px 0; }
.tile { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 10px 16px; min-width: 150px; }
.tile b { display: block; font-size: 22px; } .tile span { color: var(--soft); font-size: 13px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 9px; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; text-align: right; vertical-align: bottom; }
.sortable th { cursor: pointer; } th.word, td.word { text-align: left; } td.number { text-align: right; white-space: nowrap; }
th[aria-sort=ascending]::after { content: " \\25B2"; } th[aria-sort=descending]::after { content: " \\25BC"; }
tbody tr:hover { background: #f2f7fb; }
dt { font-weight: 600; } dd { margin: 0 0 6px; color: var(--soft); max-width: 80ch; }
figure { margin: 0; } figure svg { max-width: 100%; height: auto; } figcaption { color: var(--soft); font-size: 13.5px; }
"""
SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const key = (row, i) => { const t = row.cells[i].textContent, n = parseFloat(t.replaceAll(",", "")); return [n, t]; };
  const sort = (i) => {
    const up = heads[i].getAttribute("aria-sort") !== "ascending", sign = up ? 1 : -1, word = heads[i].className === "word";
    heads.forEach((h) => h.removeAttribute("aria-sort"));
    heads[i].setAttribute("aria-sort", up ? "ascending" : "descending");
    const rows = [...body.rows].sort((a, b) => {
      const [x, s] = key(a, i), [y, t] = key(b, i);
      if (word) return sign * s.localeCompare(t);
      return isNaN(x) - isNaN(y) || sign * (x - y);
    });
    body.append(...rows);
  };
  heads.forEach((h, i) => { h.onclick = () => sort(i); h.onkeydown = (e) => { if (e.key === "Enter") sort(i); }; });
}
"""


def benchmark_markdown(run: str, cells: Cells) -> str:
    """`benchmark.md`: the table, whether outputs are the same, how it was measured and what each column means."""
    parts = [
        f"# Benchmark of run {run}\n",
        cell_table(cells).markdown(),
        "Accept length by task and variant: [accept_length.svg](accept_length.svg). "
        "All of this as a page: [benchmark.html](benchmark.html).\n",
        "## Lossless?\n",
        lossless_summary(cells) + "\n",
        "## How it was measured\n",
        "".join(f"- {sentence}\n" for sentence in MEASURED),
        "".join(f"- {line}.\n" for line in machines(cells)),
        "## Columns\n",
        "".join(f"- `{name}`: {meaning}.\n" for name, meaning in COLUMNS.items()),
    ]
    return "\n".join(parts)


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


def page(run: Run, cells: Cells, plots: Mapping[str, str]) -> str:
    """`benchmark.html`: one file without anything outside it."""
    captions = {
        "accept_length": "Accept length by task and variant. Where the bar ends above the black mark, the drafter pays on this machine.",
        "training": "Training of each drafter. The simulated accept length walks held-out rows cycle by cycle, as serving does.",
        "rows": "Rows of each dataset after each stage, on a logarithmic scale.",
    }
    figures = {
        name: f"<figure>{inline(plots[name])}<figcaption>{html.escape(text)}</figcaption></figure>" for name, text in captions.items()
    }
    meanings = "".join(f"<div><dt>{name.replace('_', ' ')}</dt><dd>{html.escape(text)}.</dd></div>" for name, text in COLUMNS.items())
    sentences = "".join(f"<li>{html.escape(text)}</li>" for text in (*MEASURED, *(f"{line}." for line in machines(cells))))
    plan = [(title.rpartition("## ")[2].strip(), text, table.html()) for title, text, table in plan_parts(run)]
    body = [
        f"<h1>Benchmark of run {html.escape(run.name)}</h1>",
        '<p class="soft">EAGLE-3 drafters against the target alone. Click a column to sort by it; rest on it to see what it means.</p>',
        tiles(run, cells),
        card("Results", results(cells)),
        card("Accept length", figures["accept_length"]),
        card("How it was measured", f"<ul>{sentences}</ul>"),
        card("What the columns mean", f"<dl>{meanings}</dl>"),
        card("Training", figures["training"]),
        card("Rows", figures["rows"]),
        *(card(title, f"<p>{html.escape(text)}</p>{table}") for title, text, table in plan),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(run.name)}: benchmark</title>'
    top = f'<!doctype html>\n<html lang="en"><head>{head}<style>{CSS}</style></head>\n<body><main>\n'
    return f"{top}{''.join(body)}</main><script>{SCRIPT}</script></body></html>\n"


def results(cells: Cells) -> str:
    """The table, whether outputs are the same, and the notes, which are too long for a cell."""
    columns = [name for name in COLUMNS if name != "notes"]
    notes = "".join(
        f"<li><b>{html.escape(cell['task'])}, {html.escape(cell['variant'])}</b>: {html.escape('; '.join(cell['notes']))}</li>"
        for cell in cells
        if cell["notes"]
    )
    table = cell_table(cells, columns).html([COLUMNS[name] for name in columns])
    return f"{table}<p><b>Lossless?</b> {html.escape(lossless_summary(cells))}</p><p><b>Notes</b></p><ul>{notes or '<li>none</li>'}</ul>"


def tiles(run: Run, cells: Cells) -> str:
    """The few figures that a reader looks for first."""
    best = max(cells, key=lambda cell: cell["speedup"] or 0.0)
    longest = max(cells, key=lambda cell: cell["accept_length"] or 0.0)
    mixed = dataset_rows(run)
    shown = [
        (number(best["speedup"], 2) + " ×", f"best speed-up: {best['task']}, {best['variant']}"),
        (number(longest["accept_length"], 2), f"best accept length of {longest['ceiling']}: {longest['task']}, {longest['variant']}"),
        (
            f"{sum(cell['identical'] for cell in cells)} of {sum(cell['prompts'] for cell in cells)}",
            "outputs identical to the target's own",
        ),
        (number(sum(row.trained_tokens for row in mixed)), f"trained tokens in {sum(row.rows['merged'] or 0 for row in mixed):,} rows"),
    ]
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{value}</b><span>{html.escape(text)}</span></div>' for value, text in shown)
        + "</div>"
    )


def card(title: str, content: str) -> str:
    """A section with its title."""
    return f'<h2>{html.escape(title)}</h2>\n<section class="card">{content}</section>\n'


def inline(svg: str) -> str:
    """An SVG file as an element of a page: without its XML declaration and document type."""
    return svg[svg.index("<svg") :]
