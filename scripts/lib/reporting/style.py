"""How the page looks, and its script: tables sort by a click on a column, or Enter on it."""

CSS = """
:root { color-scheme: light; --ink: #1f2933; --soft: #5f6c7b; --line: #dfe5ec; --back: #f6f8fa; --gain: #1c7a46; --loss: #a8431a; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 28px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 36px 0 10px; } h3 { font-size: 15px; margin: 22px 0 4px; }
h3 + p { margin: 0; }
p, li { max-width: 100ch; } .soft { color: var(--soft); } a { color: #1f6fb2; }
nav { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13.5px; margin: 8px 0 0; }
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
tr.alone td { color: var(--soft); } tr.gain td.mark { color: var(--gain); font-weight: 600; } tr.loss td.mark { color: var(--loss); }
tr.best td { font-weight: 600; }
dt { font-weight: 600; } dd { margin: 0 0 6px; color: var(--soft); max-width: 80ch; }
pre { background: var(--back); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; overflow-x: auto; font-size: 12.5px; }
figure { margin: 0 0 26px; } figure svg { width: 100%; height: auto; display: block; }
figcaption { color: var(--soft); font-size: 13.5px; max-width: 110ch; } summary { cursor: pointer; font-weight: 600; }
"""
SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const key = (row, i) => { const t = row.cells[i].textContent, n = parseFloat(t.replaceAll(",", "")); return [n, t]; };
  const sort = (i) => {
    const up = heads[i].getAttribute("aria-sort") !== "ascending", sign = up ? 1 : -1, word = heads[i].classList.contains("word");
    heads.forEach((h) => h.removeAttribute("aria-sort"));
    heads[i].setAttribute("aria-sort", up ? "ascending" : "descending");
    const rows = [...body.rows].sort((a, b) => {
      const [x, s] = key(a, i), [y, t] = key(b, i);
      if (word) return sign * s.localeCompare(t, undefined, { numeric: true });
      if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y);
      return sign * (x - y);
    });
    body.append(...rows);
  };
  heads.forEach((h, i) => { h.onclick = () => sort(i); h.onkeydown = (e) => { if (e.key === "Enter") sort(i); }; });
}
"""
