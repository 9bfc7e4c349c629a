"""Stage report: the page in a real browser, where one is installed."""

import json
import re
import shutil
import subprocess

import pytest

from scripts.lib.ground.stage import run
from scripts.lib.reporting.build import report
from tests.report_matrix import matrix
from tests.report_parts import publish_run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
# Sorts every table by every column, twice, and notes what a person would see; errors of the page's own script are noted too.
PROBE = """
<script>
const seen = { errors: [], sorts: [] };
window.onerror = (message) => { seen.errors.push(message); };
</script>
"""
CLICKS = """
<script>
const column = (table, i) => [...table.tBodies[0].rows].map((row) => row.cells[i].textContent);
document.querySelectorAll("table.sortable").forEach((table, t) => [...table.tHead.rows[0].cells].forEach((head, i) => {
  head.click();
  seen.sorts.push([t, head.textContent, head.className, head.getAttribute("aria-sort"), column(table, i)]);
  head.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
  seen.sorts.push([t, head.textContent, head.className, head.getAttribute("aria-sort"), column(table, i)]);
}));
const box = (node) => node.getBoundingClientRect();
seen.outside = [...document.querySelectorAll("figure svg")].flatMap((svg) => [...svg.querySelectorAll("text")].filter((text) =>
  box(text).left < box(svg).left - 1 || box(text).right > box(svg).right + 1 || box(text).bottom > box(svg).bottom + 1
).map((text) => svg.getAttribute("aria-label") + ": " + text.textContent));
seen.wide = document.documentElement.scrollWidth > window.innerWidth;
seen.tips = document.querySelectorAll("figure svg title").length;
const result = document.createElement("pre");
result.id = "seen";
result.textContent = JSON.stringify(seen);
document.body.append(result);
</script>
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What the browser saw of the page of a served matrix."""
    folder = tmp_path_factory.mktemp("browser")
    job = publish_run(folder / "run", matrix())
    run(job, report)
    page = (job.output / "benchmark.html").read_text().replace("<head>", f"<head>{PROBE}").replace("</body>", f"{CLICKS}</body>")
    (folder / "page.html").write_text(page)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--window-size=1300,900"]
    command = [CHROMIUM, *flags, "--dump-dom", f"file://{folder / 'page.html'}"]
    dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    text = re.search(r'<pre id="seen">(.*?)</pre>', dom, re.DOTALL).group(1)
    return json.loads(text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


def test_every_table_sorts_by_every_column_both_ways(seen):
    assert len({table for table, *_ in seen["sorts"]}) == 6
    for _, title, kind, direction, cells in seen["sorts"]:
        if kind == "number":
            numbers = [float(re.match(r"[\d.,]+", cell).group().replace(",", "")) for cell in cells if cell != "–"]
            assert numbers == sorted(numbers, reverse=direction == "descending"), title
            assert cells[len(numbers) :] == ["–"] * (len(cells) - len(numbers)), "what is missing stands last"
    assert [direction for _, _, _, direction, _ in seen["sorts"]] == ["ascending", "descending"] * (len(seen["sorts"]) // 2)


def test_words_sort_as_words(seen):
    columns = [cells for table, title, _, direction, cells in seen["sorts"] if (table, title, direction) == (0, "task", "ascending")]
    assert columns and columns[0] == sorted(columns[0])


def test_the_page_runs_without_errors_and_fits_its_window(seen):
    assert seen["errors"] == []
    assert not seen["wide"]


def test_no_label_leaves_its_plot_and_marks_have_tips(seen):
    assert seen["outside"] == []
    assert seen["tips"] > 200
