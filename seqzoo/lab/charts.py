"""Charts as SVG text: lines with a band, and bars with a whisker. Colours are left to the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 360, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 20, 10, 40  # margins around the plot
BAR, BAR_LABELS, BAR_VALUES = 30, 90, 100  # height of a row, widths of the columns beside the bars
COLOURS = 8  # classes c0 … c7 of the style sheet

Form = Callable[..., str]  # of a value, and of a second one that sets the unit and the digits


@dataclass(frozen=True)
class Line:
    """Means over seeds along x, with their standard deviations; NaN where there is one seed."""

    label: str
    colour: int
    x: Sequence[float]
    mean: Sequence[float]
    sd: Sequence[float]


@dataclass(frozen=True)
class Bar:
    """A mean over seeds."""

    label: str
    colour: int
    mean: float
    sd: float


@dataclass(frozen=True)
class Axis:
    """What stands along an axis and where its ends are; ``ticks`` None puts them at round numbers."""

    name: str
    form: Form
    log: bool = False
    ticks: Sequence[float] | None = None
    ends: tuple[float, float] | None = None
    from_zero: bool = False

    def fitted(self, values: Sequence[float]) -> Axis:
        """The same axis with its ends around the values and its ticks."""
        low, high = self.ends or (0.0 if self.from_zero else min(values), max(values))
        if self.log:
            low, high = (low / 1.3, high * 1.3) if low == high else (low, high)
            ticks = self.ticks or log_ticks(low, high)
        else:
            low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
            ticks = self.ticks or round_ticks(low, high)
        return Axis(self.name, self.form, self.log, [t for t in ticks if low <= t <= high], (low, high))

    def at(self, value: float) -> float:
        """Where a value lies between the ends, 0 to 1; one outside is put at the nearer end."""
        assert self.ends is not None
        low, high = self.ends
        value = min(max(value, low), high)
        return math.log(value / low) / math.log(high / low) if self.log else (value - low) / (high - low)


def line_chart(lines: Sequence[Line], x: Axis, y: Axis, reference: tuple[str, float] | None = None) -> str:
    """An SVG of the lines with bands of one standard deviation; ``reference`` is a named level drawn across."""
    xs = [value for line in lines for value in line.x]
    ys = [m + s for line in lines for m, sd in zip(line.mean, line.sd, strict=True) for s in _spread(sd)]
    if y.log:
        ys = [value for value in ys if value > 0]
    if reference:
        ys.append(reference[1])
    x, y = x.fitted(xs), y.fitted(ys)

    def place(at_x: float, at_y: float) -> str:
        return f"{LEFT + x.at(at_x) * (WIDTH - LEFT - RIGHT):.1f},{_height(y, at_y):.1f}"

    parts = [_frame(x, y)]
    if reference:
        name, level = reference
        parts.append(f'<path class="reference" d="M{place(x.ends[0], level)} L{place(x.ends[1], level)}"/>')  # type: ignore[index]
        parts.append(
            f'<text class="end" x="{WIDTH - RIGHT}" y="{_height(y, level) + 12:.1f}">{escape(name)}</text>'
        )
    for line in lines:
        rows = list(zip(line.x, line.mean, line.sd, strict=True))
        if len(rows) > 1 and not any(math.isnan(sd) for sd in line.sd):
            band = [place(at, mean + sd) for at, mean, sd in rows]
            band += [place(at, mean - sd) for at, mean, sd in reversed(rows)]
            parts.append(f'<path class="band c{line.colour % COLOURS}" d="M{" L".join(band)} Z"/>')
        path = " L".join(place(at, mean) for at, mean, _ in rows)
        parts.append(f'<path class="line c{line.colour % COLOURS}" d="M{path}"/>')
        for at, mean, sd in rows:
            tip = f"{line.label}: {with_sd(mean, sd, y.form)} at {x.form(at)}"
            cx, cy = place(at, mean).split(",")
            dot = f'<circle class="dot c{line.colour % COLOURS}" cx="{cx}" cy="{cy}" r="2.6">'
            parts.append(f"{dot}<title>{escape(tip)}</title></circle>")
    label = f"{y.name} against {x.name}: {', '.join(line.label for line in lines)}"
    return _svg(HEIGHT, label, parts)


def bar_chart(bars: Sequence[Bar], name: str, form: Form) -> str:
    """An SVG with a row a bar, from 0, with the value written out."""
    room = WIDTH - BAR_LABELS - BAR_VALUES
    longest = max(bar.mean + max(_spread(bar.sd)) for bar in bars) or 1.0
    parts = []
    for row, bar in enumerate(bars):
        y, width = row * BAR + 6, room * bar.mean / longest
        middle = y + (BAR - 12) / 2
        parts.append(
            f'<text class="end" x="{BAR_LABELS - 6}" y="{middle + 4:.0f}">{escape(_short(bar.label))}</text>'
        )
        parts.append(
            f'<rect class="bar c{bar.colour % COLOURS}" x="{BAR_LABELS}" y="{y}" width="{width:.1f}" height="{BAR - 12}"/>'
        )
        if not math.isnan(bar.sd):
            ends = [BAR_LABELS + room * max(0.0, bar.mean + s) / longest for s in _spread(bar.sd)]
            parts.append(f'<path class="whisker" d="M{min(ends):.1f},{middle} H{max(ends):.1f}"/>')
        value = with_sd(bar.mean, bar.sd, form)
        parts.append(f'<text x="{WIDTH - BAR_VALUES + 8}" y="{middle + 4:.0f}">{escape(value)}</text>')
    return _svg(len(bars) * BAR, name, parts)


def round_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    return [round(i * step, 12) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, or of two where there are too few of those."""
    for base in (10, 2):
        first, last = math.ceil(math.log(low, base)), math.floor(math.log(high, base))
        if last - first >= 2:
            break
    stride = -(-(last - first + 1) // 6)
    return [float(base) ** power for power in range(first, last + 1, max(1, stride))]


def with_sd(mean: float, sd: float, form: Form) -> str:
    """A figure: mean ± sd, or the mean alone of one seed."""
    return form(mean) if math.isnan(sd) else f"{form(mean, mean)} ± {form(sd, mean)}"


def _spread(sd: float) -> tuple[float, ...]:
    return (0.0,) if math.isnan(sd) else (-sd, sd)


def _short(label: str) -> str:
    return label if len(label) <= 14 else label[:13] + "…"


def _height(y: Axis, value: float) -> float:
    return TOP + (1 - y.at(value)) * (HEIGHT - TOP - BOTTOM)


def _frame(x: Axis, y: Axis) -> str:
    """Grid, ticks and the axes' names."""
    parts = []
    bottom = HEIGHT - BOTTOM
    for tick in y.ticks or ():
        at = _height(y, tick)
        parts.append(f'<path class="grid" d="M{LEFT},{at:.1f} H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="end" x="{LEFT - 5}" y="{at + 4:.1f}">{escape(y.form(tick))}</text>')
    for tick in x.ticks or ():
        at = LEFT + x.at(tick) * (WIDTH - LEFT - RIGHT)
        parts.append(f'<path class="grid" d="M{at:.1f},{TOP} V{bottom}"/>')
        parts.append(f'<text class="middle" x="{at:.1f}" y="{bottom + 15}">{escape(x.form(tick))}</text>')
    centre = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="middle" x="{centre}" y="{HEIGHT - 6}">{escape(x.name)}</text>')
    return "".join(parts)


def _svg(height: int, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )
