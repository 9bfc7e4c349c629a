"""The local page: all jobs at work, refreshed by itself."""

import html
import json
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from scripts.lib.ground.progress import clock
from scripts.lib.watching.found import STOPPED, Found
from scripts.lib.watching.screen import NOTHING, ends_in, number

REFRESH_SECONDS = 2
WIDTH, HEIGHT = 220, 40
CSS = """
:root { color-scheme: light dark; --ink: #1f2933; --soft: #5f6c7b; --line: #dfe5ec; --back: #f6f8fa; --card: #fff; --bar: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ec; --soft: #9aa7b4; --line: #333c46; --back: #14181d; --card: #1c2228; --bar: #56b4e9; } }
* { box-sizing: border-box; } body { margin: 0; background: var(--back); color: var(--ink);
  font: 15px/1.45 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 24px 20px 50px; } h1 { font-size: 24px; margin: 0; } .soft { color: var(--soft); }
article { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 18px; margin: 14px 0; }
article header { display: flex; justify-content: space-between; gap: 16px; align-items: baseline; flex-wrap: wrap; }
h2 { font-size: 17px; margin: 0; } .state { font-size: 13px; color: var(--soft); } .state.bad { color: #d55e00; font-weight: 600; }
.bar { background: var(--line); border-radius: 5px; height: 10px; margin: 10px 0 12px; overflow: hidden; }
.bar i { display: block; background: var(--bar); height: 100%; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px 18px; margin: 0;
  font-variant-numeric: tabular-nums; }
dt { color: var(--soft); font-size: 12.5px; } dd { margin: 0; font-size: 17px; } dd small { color: var(--soft); font-size: 12.5px; }
dl .wide { grid-column: span 2; } .curves { display: flex; gap: 34px; flex-wrap: wrap; margin-top: 12px; }
figure { margin: 0; } figcaption { color: var(--soft); font-size: 12.5px; } svg { display: block; overflow: visible; }
polyline { fill: none; stroke: var(--bar); stroke-width: 1.6; vector-effect: non-scaling-stroke; }
"""


def page(jobs: Sequence[Found]) -> str:
    """The whole page."""
    stopped = sum(job.figures["condition"] == STOPPED for job in jobs)
    working = len(jobs) - stopped
    title = f"{working} job{'s' * (working != 1)} at work" + (f", {stopped} stopped" if stopped else "")
    body = "".join(map(card, jobs)) or '<p class="soft">Nothing is at work just now; finished stages are in the report.</p>'
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><meta http-equiv="refresh" content="{REFRESH_SECONDS}">'
    )
    note = (
        f"Every {REFRESH_SECONDS} seconds from the progress.json files below results/work. The ETA interval holds 99 % of what may happen."
    )
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<title>aerie: {title}</title><style>{CSS}</style></head>\n'
        f'<body><main><h1>{title}</h1><p class="soft">{note}</p>{body}</main></body></html>\n'
    )


def card(job: Found) -> str:
    """One job."""
    figures = job.figures
    share = figures["done"] / figures["total"] if figures["total"] else 1.0
    bad = "" if figures["condition"] == "running" else " bad"
    history = figures.get("history", {})
    curves = curve("tokens a second", history.get("tokens_per_second")) + curve(
        "tokens an answer, lately", history.get("mean_tokens_recent")
    )
    curves = curves or curve(f"{figures['unit']} a second", history.get("rate"))
    return (
        f"<article><header><h2>{html.escape(job.label)} <span class=soft>{html.escape(job.run)}</span></h2>"
        f'<span class="state{bad}">{html.escape(figures["condition"])}, {clock(figures["seconds"])} so far</span></header>'
        f'<div class="bar"><i style="width:{100 * share:.2f}%"></i></div><dl>{facts(figures, share)}</dl>'
        f'<div class="curves">{curves}</div></article>'
    )


def facts(figures: Mapping[str, Any], share: float) -> str:
    """The figures of a job as entries of a definition list."""
    done = f"{number(figures['done'])} <small>of {number(figures['total'])} {html.escape(figures['unit'])}, {share:.1%}</small>"
    naive = figures.get("eta_naive_seconds")
    beside = f" <small>at the rate so far {clock(naive)}</small>" if naive is not None else ""
    entries = [("done", done, True), ("would end in" if figures["condition"] == STOPPED else "ends in", ends_in(figures) + beside, True)]
    entries += [
        ("tokens a second", number(figures.get("tokens_per_second")), False),
        (f"{html.escape(figures['unit'])} a second", number(figures["rate"], 1), False),
    ]
    if figures.get("running") is not None:
        mean, recent, to_come = (figures[name] for name in ("mean_tokens", "mean_tokens_recent", "mean_tokens_to_come"))
        lengths = f"{number(mean)} <small>lately {number(recent)}, to come {number(to_come)}</small>"
        entries += [("in flight", number(figures["running"]), False), ("mean tokens an answer", lengths, True)]
        entries += [("ended by", counted(figures["finish_reasons"]), False), ("sent again", counted(figures["retries"]), False)]
    elif figures.get("note"):
        entries += [("note", html.escape(figures["note"]), True)]
    return "".join(f"<div{' class=wide' if wide else ''}><dt>{name}</dt><dd>{text}</dd></div>" for name, text, wide in entries)


def counted(counts: Mapping[str, int]) -> str:
    """Names with their counts."""
    return "<br>".join(f"{html.escape(name)} <small>{count:,}</small>" for name, count in counts.items()) or NOTHING


def curve(name: str, values: Sequence[float | None] | None) -> str:
    """A small curve over the run with its lowest, highest and last value; nothing for fewer than two points."""
    known = [value for value in values or [] if value is not None]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    scale = HEIGHT / (high - low) if high > low else 0.0
    points = " ".join(f"{WIDTH * i / (len(known) - 1):.1f},{HEIGHT - (value - low) * scale:.1f}" for i, value in enumerate(known))
    svg = f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(name)}">'
    legend = f"{html.escape(name)}: {number(low)} to {number(high)}, now {number(known[-1])}"
    return f'<figure>{svg}<polyline points="{points}"/></svg><figcaption>{legend}</figcaption></figure>'


def serving(jobs: Callable[[], Sequence[Found]], port: int) -> ThreadingHTTPServer:
    """A server on this machine alone: `/` is the page, `/progress.json` the figures; port 0 takes a free one."""

    class Handler(BaseHTTPRequestHandler):
        """Answers GET."""

        def do_GET(self) -> None:
            """The page, the figures, or 404."""
            if self.path == "/":
                self._answer(200, "text/html; charset=utf-8", page(jobs()))
            elif self.path == "/progress.json":
                found = [{"run": job.run, "job": job.label} | {k: v for k, v in job.figures.items() if k != "state"} for job in jobs()]
                self._answer(200, "application/json", json.dumps(found))
            else:
                self._answer(404, "text/plain", "only / and /progress.json are here\n")

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing of each request."""

        def _answer(self, status: int, kind: str, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)
