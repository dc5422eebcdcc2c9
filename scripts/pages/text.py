"""Markdown: numbers, tables, charts with a caption, prose of docstrings."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from seqzoo.lab.charts import COLOURS


def number(value: float, _: float | None = None) -> str:
    """Three digits that count, and a comma for each thousand."""
    if value == 0 or math.isnan(value):
        return "0" if value == 0 else "–"
    if abs(value) < 1e-3:
        mantissa, _, power = f"{value:.1e}".partition("e")
        return f"{mantissa}e{int(power)}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def size(count: float, _: float | None = None) -> str:
    """Bytes in a unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"
        count /= 1024
    raise AssertionError


def cell(value: Any) -> str:
    """A value in a table."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, float):
        return number(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, dict):
        return "; ".join(f"{prose(str(k))}: {cell(v)}" for k, v in value.items()) or "–"
    if isinstance(value, list):
        return ", ".join(cell(v) for v in value) or "none"
    return prose(str(value))


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; strings of a row are Markdown already, other values are formatted."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        cells = (value if isinstance(value, str) else cell(value) for value in row)
        lines.append(f"| {' | '.join(c.replace('|', chr(92) + '|') for c in cells)} |")
    return "\n".join(lines) + "\n"


def prose(text: str) -> str:
    """Plain text of a docstring as Markdown: what means something there stands for itself, code in backticks stays."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(
        p if p.startswith("`") else re.sub(r"([\\*_\[\]])", r"\\\1", p.replace("<", "&lt;")) for p in pieces
    )


def figure(svg: str, caption: str, legend: Sequence[tuple[str, int]] = ()) -> str:
    """An SVG with its caption, and the colours of its lines where there are several; one line, so that Markdown keeps it."""
    keys = "".join(
        f'<span class="key"><i class="c{colour % COLOURS}"></i>{name}</span>' for name, colour in legend
    )
    svg = svg.replace("\n", " ")
    return f'<figure class="plot">{svg}<figcaption>{keys and f"<span>{keys}</span>"}{caption}</figcaption></figure>\n'
