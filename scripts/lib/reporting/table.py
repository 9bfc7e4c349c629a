"""Tables that print as Markdown and as HTML, and how numbers look in them."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

MISSING = "–"
BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def number(value: float | None, digits: int = 0) -> str:
    """`value` with thousands separators; a dash when there is none, never a number that looks measured."""
    return MISSING if value is None else f"{value:,.{digits}f}"


def size(count: float | None) -> str:
    """A number of bytes in the unit that suits it."""
    if count is None:
        return MISSING
    unit = 0
    while count >= 1024 and unit < len(BINARY_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:,.{1 if unit else 0}f} {BINARY_UNITS[unit]}"


@dataclass(frozen=True)
class Table:
    """A header and rows of ready text; columns named in `words` hold words, all others numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[str] = ()

    def markdown(self) -> str:
        """The table as GitHub shows it."""
        rule = ["---" if title in self.words else "---:" for title in self.header]
        lines = [self.header, rule, *([cell.replace("|", "\\|") for cell in row] for row in self.rows)]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def html(self, hints: Sequence[str] = (), classes: Sequence[str] = (), marked: str = "") -> str:
        """The table as HTML.

        With `hints`, which explain the columns, one each, it can be sorted by a click on a column. `classes` are those of the rows,
        one each, and `marked` is the column whose cells show them.
        """
        kinds = ["word" if title in self.words else "number" for title in self.header]
        titles = [f' title="{html.escape(hint)}" tabindex="0"' for hint in hints] or [""] * len(self.header)
        head = "".join(
            f'<th scope="col" class="{kind}"{title}>{html.escape(name)}</th>'
            for kind, title, name in zip(kinds, titles, self.header, strict=True)
        )
        cells = [f"{kind} mark" if title == marked else kind for kind, title in zip(kinds, self.header, strict=True)]
        rows = [f' class="{kind}"' for kind in classes] or [""] * len(self.rows)
        body = "".join(f"<tr{kind}>{html_cells(cells, row)}</tr>\n" for kind, row in zip(rows, self.rows, strict=True))
        opening = '<table class="sortable">' if hints else "<table>"
        return f'<div class="scroll">{opening}\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n'


def html_cells(kinds: Sequence[str], row: Sequence[str]) -> str:
    """The cells of a row with their classes."""
    return "".join(f'<td class="{kind}">{html.escape(words)}</td>' for kind, words in zip(kinds, row, strict=True))
