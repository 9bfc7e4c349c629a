"""Drawing in SVG: elements, scales, panels with axes. Numbers are rounded, nothing is random: equal figures give equal bytes."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]
Ticks = Sequence[tuple[float, str]]

INK, SOFT, LINES = "#1f2933", "#5f6c7b", "#e3e8ee"
COLOURS = ("#1F6FB2", "#C2571A", "#2A8A57", "#8E4A9E", "#B03A48", "#7A6A2F", "#1A8C99", "#4F6D7A")  # dark enough for white text
FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
DASHES = "5 4"
LETTER = 7.0  # mean width of a letter at 12 px, in px
SHAPES = {
    "circle": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
    "square": "M-4 -4H4V4H-4z",
    "diamond": "M0 -5.8L5.8 0L0 5.8L-5.8 0z",
    "up": "M0 -5.4L5.2 4H-5.2z",
    "down": "M0 5.4L5.2 -4H-5.2z",
    "bar": "M-5.5 -1.6H5.5V1.6H-5.5z",
}


def colour(index: int) -> str:
    """A colour for the series of that index."""
    return COLOURS[index % len(COLOURS)]


def marker(index: int) -> str:
    """A shape for the series of that index."""
    return tuple(SHAPES)[index % 5]


def element(name: str, content: str = "", tip: str = "", **attributes: str | float) -> str:
    """One element with its `content`, which is markup; `tip` is shown where the pointer rests on it. Underlines in names become hyphens."""
    pairs = "".join(f' {key.strip("_").replace("_", "-")}="{value_text(value)}"' for key, value in attributes.items() if value != "")
    inner = (f"<title>{html.escape(tip)}</title>" if tip else "") + content
    return f"<{name}{pairs}>{inner}</{name}>" if inner else f"<{name}{pairs}/>"


def value_text(value: str | float) -> str:
    """An attribute's value; coordinates to a tenth of a pixel."""
    return html.escape(value) if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


def text(at: Point, words: str, anchor: str = "start", size: float = 12, **looks: str) -> str:
    """Words at a point; `looks` are further attributes."""
    return element("text", html.escape(words), x=at[0], y=at[1], text_anchor=anchor, font_size=size, **{"fill": INK, **looks})


def mark(at: Point, shape: str, fill: str, tip: str = "") -> str:
    """A small shape at a point, with a white rim where it lies on others."""
    place = f"translate({at[0]:.1f} {at[1]:.1f})"
    return element("path", tip=tip, d=SHAPES[shape], transform=place, fill=fill, stroke="#ffffff", stroke_width=0.8)


def line(points: Sequence[Point], stroke: str, width: float = 1.6, tip: str = "", **looks: str) -> str:
    """A line through points; `looks` are further attributes."""
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return element("path", tip=tip, d=path, fill="none", stroke=stroke, stroke_width=width, **looks)


def area(points: Sequence[Point], fill: str, opacity: float = 0.15) -> str:
    """A filled outline."""
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) + "z"
    return element("path", d=path, fill=fill, fill_opacity=f"{opacity:g}")


def box(corner: Point, width: float, height: float, fill: str, tip: str = "") -> str:
    """A filled rectangle below and to the right of its corner."""
    return element("rect", tip=tip, x=corner[0], y=corner[1], width=max(width, 0.0), height=max(height, 0.0), fill=fill)


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` along pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """The pixel of `value`."""
        low, high, here = (math.log(v) for v in (self.low, self.high, value)) if self.logarithmic else (self.low, self.high, value)
        return self.start + (here - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values within the scale, about five."""
        if self.logarithmic:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 10) if len(decades) > 4 else (1, 2, 5)
            return [step * 10.0**decade for decade in decades for step in steps if self.low <= step * 10.0**decade <= self.high]
        rough = (self.high - self.low) / 5
        magnitude = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= rough * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(index * step, 10) for index in range(first, last + 1)]


@dataclass(frozen=True)
class Panel:
    """A field with two axes."""

    x: Scale
    y: Scale

    def at(self, x: float, y: float) -> Point:
        """The pixel of a point."""
        return self.x.at(x), self.y.at(y)

    def line(self, points: Sequence[Point], stroke: str, width: float = 1.6, tip: str = "", **looks: str) -> str:
        """A line through points of the field."""
        return line([self.at(*point) for point in points], stroke, width, tip, **looks)

    def whisker(self, x: float, low: float, high: float, stroke: str) -> str:
        """An interval of y at x."""
        return self.line([(x, low), (x, high)], stroke, 1.2, stroke_opacity="0.7")

    def level(self, y: float, stroke: str = INK, dashes: str = DASHES) -> str:
        """A dashed line across the field."""
        return self.line([(self.x.low, y), (self.x.high, y)], stroke, 1.2, stroke_dasharray=dashes)

    def frame(self, title: str, x_label: str = "", y_label: str = "", x_ticks: Ticks | None = None, y_ticks: Ticks | None = None) -> str:
        """Title, light lines, ticks and labels. Ticks are pairs of value and words; left out, they are round values."""
        left, right, top, bottom = self.x.start, self.x.end, self.y.end, self.y.start
        parts = [text((left, top - 9), title, size=12.5, font_weight="600")]
        for value, words in plain_ticks(self.y) if y_ticks is None else y_ticks:
            parts.append(line([(left, self.y.at(value)), (right, self.y.at(value))], LINES, 1))
            parts.append(text((left - 6, self.y.at(value) + 4), words, "end", 11, fill=SOFT))
        parts.append(line([(left, bottom), (right, bottom)], "#9aa5b1", 1))
        for value, words in plain_ticks(self.x) if x_ticks is None else x_ticks:
            parts.append(text((self.x.at(value), bottom + 15), words, "middle", 11, fill=SOFT))
        if x_label:
            parts.append(text(((left + right) / 2, bottom + 31), x_label, "middle", 11.5, fill=SOFT))
        if y_label:
            x, y = left - 45, (top + bottom) / 2
            parts.append(text((x, y), y_label, "middle", 11.5, fill=SOFT, transform=f"rotate(-90 {x:.1f} {y:.1f})"))
        return "".join(parts)


def plain_ticks(scale: Scale) -> list[tuple[float, str]]:
    """The round values of a scale with their words."""
    return [(value, f"{value:,.10g}") for value in scale.ticks()]


@dataclass(frozen=True)
class Grid:
    """Panels of one size side by side, below a legend. Sizes in px; `margin` left of each panel is for the labels of its y axis."""

    count: int
    columns: int
    height: float = 210
    width: float = 1120
    top: float = 34
    margin: float = 60
    gap: float = 66

    def place(self, index: int) -> tuple[float, float, float, float]:
        """Left, right, top and bottom of a panel's field."""
        row, column = divmod(index, self.columns)
        width = self.width / self.columns
        top = self.top + 26 + row * (self.height + self.gap)
        return column * width + self.margin, (column + 1) * width - 14, top, top + self.height

    def panel(self, index: int, x: tuple[float, float], y: tuple[float, float], log_x: bool = False, log_y: bool = False) -> Panel:
        """The panel of that index with the ranges of its axes."""
        left, right, top, bottom = self.place(index)
        return Panel(Scale(*x, left, right, log_x), Scale(*y, bottom, top, log_y))

    @property
    def whole_height(self) -> float:
        """Height of the drawing."""
        rows = -(-self.count // self.columns)
        return self.top + 26 + rows * (self.height + self.gap) - self.gap + 40


@dataclass(frozen=True)
class Key:
    """An entry of a legend: its words and how it looks; `line` makes it a line with these dashes instead of a shape."""

    words: str
    fill: str
    shape: str = "square"
    line: str = ""


def legend(keys: Sequence[Key], width: float, top: float = 14) -> tuple[str, float]:
    """Entries in lines of at most `width`, and the y below them."""
    parts, left = [], 4.0
    for key in keys:
        need = 30 + LETTER * len(key.words)
        if left + need > width and left > 4:
            left, top = 4.0, top + 20
        if key.line:
            parts.append(line([(left, top), (left + 16, top)], key.fill, 2, stroke_dasharray=key.line))
        else:
            parts.append(mark((left + 8, top), key.shape, key.fill))
        parts.append(text((left + 21, top + 4), key.words))
        left += need
    return "".join(parts), top + 12


def drawing(label: str, width: float, height: float, content: str) -> str:
    """A whole SVG file on white; `label` says what it shows to those who do not see it."""
    size = f"0 0 {width:.0f} {height:.0f}"
    back = box((0, 0), width, height, "#ffffff")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" width="{width:.0f}" height="{height:.0f}" role="img" '
        f'aria-label="{html.escape(label)}" font-family="{FONT}">{back}{content}</svg>\n'
    )
