"""Charts of the recorded runs, by what their rows hold."""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from seqzoo.lab.charts import Axis, Bar, Line, bar_chart, line_chart

from .curves import chart, comparison
from .records import Record, Row
from .text import figure, number


def charts(record: Record) -> str:
    drawn: list[str] = []
    found = comparison(record)
    if found:
        ranked = sorted(found.curves, key=lambda name: found.metric(name) or 0)
        drawn += [
            chart(found, ranked[i : i + 6], [n for n in ranked if n not in ranked[i : i + 6]])
            for i in range(0, len(ranked), 6)
        ]
    for row in record.rows("case", "ms"):
        bars = [
            Bar(_peer(n), int(n != "ours"), v, math.nan)
            for n, v in row["ms"].items()
            if isinstance(v, int | float)
        ]
        if bars:
            goals = row.get("target") or {}
            told = [
                f"{escape(n)}: {number(row['ratio'][n])} times our time, floor {number(goal)}, "
                f"{'reached' if row['ratio'][n] >= goal else 'missed'}"
                for n, goal in goals.items()
                if n in row.get("ratio", {})
            ]
            caption = (
                f"{escape(row['case'])}, milliseconds; less is better. {'; '.join(told)}{'.' if told else ''}"
            )
            drawn.append(figure(bar_chart(bars, f"{row['case']}, milliseconds", number), caption))
    decoding = record.rows("mixer", "context", "tokens_per_second")
    if decoding:
        drawn += [
            _by_context(decoding, "tokens_per_second", "tokens a second"),
            _by_context(decoding, "state_bytes", "bytes of state"),
        ]
    figures = record.rows("mixer", "code", "quantity", "value")
    for quantity in dict.fromkeys(row["quantity"] for row in figures):
        mine = [row for row in figures if row["quantity"] == quantity]
        bars = [
            Bar(
                r["mixer"] if r["code"] == "seqzoo" else r["code"].replace("transformers ", ""),
                int(r["code"] != "seqzoo"),
                r["value"],
                math.nan,
            )
            for r in mine
        ]
        drawn.append(
            figure(bar_chart(bars, quantity, number), escape(quantity), [("seqzoo", 0), ("other code", 1)])
        )
    drawn += _kernels(record) + _ways(record)
    return f'<div class="plots">{"".join(d.strip() for d in drawn)}</div>\n' if drawn else ""


def _kernels(record: Record) -> list[str]:
    """A chart for each shape and dtype of `_tiles`."""
    drawn = []
    for label, best, floor, peers in tiles(record):
        bars = [Bar("ours", 0, best, math.nan)]
        bars += [Bar("copies", 7, floor, math.nan)] if floor else []
        bars += [Bar(name.split(",")[0], 1, value, math.nan) for name, value in peers.items()]
        caption = f"{escape(label)}: forward and backward, milliseconds, of our fastest tile; less is better."
        drawn.append(figure(bar_chart(bars, f"{label}, milliseconds", number), caption))
    return drawn


def tiles(record: Record) -> Iterator[tuple[str, float, float | None, dict[str, float]]]:
    """Kernels by shape and dtype: the label, the best of the tiles, copies of as many bytes, and peers."""
    peers = next((v for k, v in record.data.items() if k.startswith("peers")), {})
    copies = next((v for k, v in record.data.items() if k.startswith("copies")), {})
    rows = record.rows("shape", "dtype", "forward", "backward", "tile")
    for shape, dtype in dict.fromkeys((tuple(r["shape"]), r["dtype"]) for r in rows):
        best = min(
            r["forward"] + r["backward"] for r in rows if (tuple(r["shape"]), r["dtype"]) == (shape, dtype)
        )
        floor = (
            copies.get(dtype) if math.prod(shape) == 8 * 2048 * 2048 else None
        )  # what the copies were as large as
        label = f"{list(shape)} {dtype}"
        told = {name: times["forward and backward"] for name, times in peers.get(label, {}).items()}
        yield label, best, sum(floor.values()) if isinstance(floor, Mapping) else None, told


def _ways(record: Record) -> list[str]:
    """Of `python -m seqzoo_kernels.bench OP`: each case by the ways to compute it; the first way is ours."""
    cases = record.rows("case", "ways")
    drawn = _over_length([row for row in cases if row.get("length")])
    for row in cases:
        if row.get("length"):
            continue
        ours = next(iter(row["ways"]))
        for what in ("forward", "forward and backward"):
            timed = {
                name: way[what] for name, way in row["ways"].items() if isinstance(way.get(what), int | float)
            }
            if not timed:
                continue
            bars = [Bar(name, _colour(name, ours), value, math.nan) for name, value in timed.items()]
            goal = row.get("target", {}).get(what)
            told = ""
            if goal is not None and ours in timed:
                told = f" Our goal is {number(goal)}: {'reached' if timed[ours] <= goal else 'missed'}."
            drawn.append(
                figure(
                    bar_chart(bars, f"{row['case']}, {what}", number),
                    f"{escape(row['case'])}: {what}, milliseconds.{told}",
                )
            )
    return drawn


def _over_length(rows: Sequence[Row]) -> list[str]:
    """The cases that are points of a plot over T: a chart for each family of them and each pass, a line for each way."""
    drawn = []
    for family in dict.fromkeys(row["case"].partition(" [")[0] for row in rows):
        mine = sorted((r for r in rows if r["case"].partition(" [")[0] == family), key=lambda r: r["length"])
        names = list(dict.fromkeys(name for row in mine for name in row["ways"]))
        for what in ("forward", "forward and backward"):
            lines = []
            for place, name in enumerate(names):
                timed = [
                    (r["length"], r["ways"][name][what]) for r in mine if what in r["ways"].get(name, {})
                ]
                if timed:
                    x, y = map(list, zip(*timed, strict=True))
                    colour = 7 if name.startswith(("cop", "product")) else place
                    lines.append(Line(name, colour, x, y, [math.nan] * len(x)))
            if not lines:
                continue
            ticks = [row["length"] for row in mine]
            x_axis = Axis("T", lambda v, _=None: _in_k(v), log=True, ticks=ticks)
            svg = line_chart(lines, x_axis, Axis("milliseconds", number, log=True))
            shape = mine[-1]["case"].partition(" [")[2]
            caption = (
                f"{escape(family)}, {what}, as many tokens at each T; the last point is [{escape(shape)}."
            )
            drawn.append(figure(svg, caption, [(line.label, line.colour) for line in lines]))
    return drawn


def _in_k(length: float) -> str:
    return f"{length / 1024:g}k" if length >= 1024 else f"{length:g}"


def _colour(name: str, ours: str) -> int:
    return 0 if name == ours else 7 if name.startswith("cop") else 1


def _by_context(rows: Sequence[Row], key: str, name: str) -> str:
    lines = []
    for colour, mixer in enumerate(dict.fromkeys(r["mixer"] for r in rows)):
        mine = [r for r in rows if r["mixer"] == mixer]
        lines.append(
            Line(mixer, colour, [r["context"] for r in mine], [r[key] for r in mine], [math.nan] * len(mine))
        )
    x = Axis(
        "context, tokens", lambda v, _=None: f"{v:,.0f}", log=True, ticks=sorted({r["context"] for r in rows})
    )
    y = Axis(name, number, log=key == "state_bytes", from_zero=key != "state_bytes")
    return figure(
        line_chart(lines, x, y),
        f"{name.capitalize()} against context.",
        [(line.label, line.colour) for line in lines],
    )


def _peer(name: str) -> str:
    return name.replace(" (another function)", "")
