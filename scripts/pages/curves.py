"""Figures of single mixers for their pages: the learning curve of a comparison, and speeds, each with where it was measured."""

import math
import statistics
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from seqzoo.lab.charts import Axis, Line, line_chart

from .records import Record, of_mixer
from .text import figure, number, prose, size, table

GREY = 7
RERUN = "`seqzoo compare --mixers {name},attention --out runs/{name}` draws it on your machine."


class Comparison(NamedTuple):
    """A recorded comparison: curves of the metric against steps, by mixer and seed."""

    record: Record
    metric_name: str
    curves: dict[str, list[list[tuple[float, float]]]]

    def metric(self, name: str) -> float | None:
        """Where a mixer ended, the mean over its seeds."""
        found = self.curves.get(name)
        return statistics.fmean(curve[-1][1] for curve in found) if found else None

    def line(self, name: str, colour: int) -> Line:
        """Mean and deviation over the seeds, at the steps that all of them have."""
        curves = [dict(curve) for curve in self.curves[name]]
        at = sorted(set.intersection(*(set(curve) for curve in curves)))
        values = [[curve[x] for curve in curves] for x in at]
        sd = [statistics.stdev(v) if len(v) > 1 else math.nan for v in values]
        return Line(name, colour, at, [statistics.fmean(v) for v in values], sd)


def latest_comparison(records: Sequence[Record]) -> Comparison | None:
    """The newest recorded comparison on text, or None."""
    for record in records:
        found = comparison(record)
        if found and found.metric_name.startswith("bits"):
            return found
    return None


def comparison(record: Record) -> Comparison | None:
    """The curves that scripts/condense_comparison.py keeps, mixers -> seeds -> [step, metric]; None where there are none."""
    mixers = record.data.get("mixers")
    if not isinstance(mixers, dict) or "curve" not in record.data:
        return None
    curves = {
        name: [[(x, y) for x, y in c] for c in told["curves"].values()] for name, told in mixers.items()
    }
    return Comparison(record, str(record.data["curve"][1]).replace("_", " "), curves)


def chart(found: Comparison, mixers: Sequence[str], behind: Sequence[str] = ()) -> str:
    """The curves of `mixers` in colour, and of those `behind` in grey."""
    lines = [found.line(name, GREY) for name in behind]
    lines += [found.line(name, colour) for colour, name in enumerate(mixers)]
    axes = Axis("steps", lambda v, _=None: f"{v:,.0f}"), Axis(found.metric_name, number)
    for_seeds = max(len(found.curves[name]) for name in mixers)
    caption = f"{found.metric_name.capitalize()} on held-out data against steps; {for_seeds} seeds. {where(found.record)}"
    legend = [(name, colour) for colour, name in enumerate(mixers)] + [("the others", GREY)] * bool(behind)
    return figure(line_chart(lines, *axes), caption, legend)


def curve_of(name: str, records: Sequence[Record]) -> str:
    """The section of a mixer's page."""
    found = latest_comparison(records)
    if found is None or name not in found.curves:
        return f"No learning curve of `{name}` is recorded yet. {RERUN.format(name=name)}\n"
    shown = [name] + [other for other in ("attention",) if other in found.curves and other != name]
    ended = ", ".join(f"`{n}` {number(found.metric(n) or 0)}" for n in shown)
    behind = [other for other in found.curves if other not in shown]
    return f"{chart(found, shown, behind)}\nAt the end: {ended}. {RERUN.format(name=name)}\n"


def speeds_of(name: str, records: Sequence[Record]) -> str:
    """Decoding by context, training beside plain code, and what a GPU gave."""
    parts = [*_decoding(name, records), *_layers(name, records), *_measured(name, records)]
    return "\n".join(parts) or (
        f"No speed of `{name}` is recorded yet. `seqzoo bench` measures it, and so does `python scripts/generation_speed.py`.\n"
    )


def where(record: Record) -> str:
    """Machine, versions and date, with a link to the page of the record."""
    versions = ", ".join(f"{k} {v}" for k, v in record.versions.items() if k in ("torch", "triton"))
    link = (
        f'<a href="../benchmarks/{record.stem}.html">recorded {record.date}</a>'  # from any page of a section
    )
    return f"{escape(record.machine)}, {versions}, {link}."


def _decoding(name: str, records: Sequence[Record]) -> list[str]:
    for record, rows in of_mixer(records, name, "context", "tokens_per_second"):
        others = [r for r in record.rows("mixer", "context") if r["mixer"] not in (name, "attention")]
        shown = [name] + ["attention"] * (name != "attention")
        lines = [_decode_line(record, other, GREY) for other in dict.fromkeys(r["mixer"] for r in others)]
        lines += [_decode_line(record, other, colour) for colour, other in enumerate(shown)]
        lines = [line for line in lines if line.x]
        x = Axis(
            "context, tokens",
            lambda v, _=None: f"{v:,.0f}",
            log=True,
            ticks=sorted({r["context"] for r in rows}),
        )
        svg = line_chart(lines, x, Axis("tokens a second", number, from_zero=True))
        caption = (
            f"Tokens a second while decoding one sequence behind a context; {record.data.get('depth')} layers of width "
            f"{record.data.get('dim')}. {where(record)}"
        )
        legend = [*((n, c) for c, n in enumerate(shown)), ("the others", GREY)]
        figures = [(f"{r['context']:,}", r["tokens_per_second"], size(r["state_bytes"])) for r in rows]
        return [figure(svg, caption, legend), table(("context", "tokens a second", "state"), figures)]
    return []


def _decode_line(record: Record, name: str, colour: int) -> Line:
    rows = [r for r in record.rows("mixer", "context", "tokens_per_second") if r["mixer"] == name]
    speeds = [r["tokens_per_second"] for r in rows]
    return Line(name, colour, [r["context"] for r in rows], speeds, [math.nan] * len(rows))


def _layers(name: str, records: Sequence[Record]) -> list[str]:
    for record, rows in of_mixer(records, name, "code", "quantity", "value"):
        shape = record.data.get("shape", {})
        what = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in shape.items())
        told = [(r["quantity"], prose(r["code"]), r["value"]) for r in rows]
        return [
            f"A language model of this mixer ({what}), beside plain PyTorch code of the same model and other libraries. "
            f"{where(record)}\n\n" + table(("quantity", "code", "value"), told)
        ]
    return []


def _measured(name: str, records: Sequence[Record]) -> list[str]:
    for record, rows in of_mixer(records, name, "check", "passed"):
        told: list[tuple[Any, ...]] = [(prose(r["check"]), r["passed"], r["error"]) for r in rows]
        return [
            f"On a GPU the laws are checked too. {where(record)}\n\n"
            + table(("check", "passed", "largest error, relative"), told)
        ]
    return []
