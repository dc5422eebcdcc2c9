"""The page of a report: one HTML file that needs nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from seqzoo.lab.charts import COLOURS, Axis, Bar, Form, Line, bar_chart, line_chart, with_sd
from seqzoo.lab.compare import Spread
from seqzoo.lab.report import Folder, Group, Section

UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
HIGHER_IS_BETTER = {"accuracy"}
COLUMNS = {
    "metric": "",
    "parameters": "parameters",
    "train_tokens_per_second": "training, tokens/s",
    "decode_tokens_per_second": "decoding, tokens/s",
    "state_bytes": "state",
    "seconds": "whole run, s",
}


def page(sections: Sequence[Section]) -> str:
    """The HTML of the sections, one a task."""
    names = ", ".join(dict.fromkeys(_task_name(section.task) for section in sections))
    body = "".join(_section(section) for section in sections)
    style = files("seqzoo.lab").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Token mixers compared: {escape(names)}</title><style>\n{style}</style></head>\n<body><main>"
        f"<h1>Token mixers compared</h1>{body}</main></body></html>\n"
    )


def number(value: float, like: float | None = None) -> str:
    """Three digits, with k, M or G where it is long: 0.125, 12.5, 1.25k. With ``like``, in the unit and digits of that."""
    model = abs(value if like is None else like)
    unit, suffix = next(((u, s) for u, s in UNITS if model >= u * 0.9995), (1.0, ""))
    if like is None:
        return f"{value / unit:.3g}{suffix}"
    digits = 2 - math.floor(math.log10(model / unit)) if model else 0
    return f"{value / unit:.{max(0, digits)}f}{suffix}"


def size(value: float, like: float | None = None) -> str:
    """Bytes: 512 B, 2 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"


def metric_form(value: float, like: float | None = None) -> str:
    """Of a metric of a few units: three digits behind the point."""
    return f"{value:.3f}"


def whole(value: float, like: float | None = None) -> str:
    """Without digits behind the point."""
    return f"{value:.0f}"


def _section(section: Section) -> str:
    metric = section.metric.replace("_", " ")
    better = "higher" if section.metric in HIGHER_IS_BETTER else "lower"
    parts = [f"<section><h2>{escape(_title(section.task))}</h2>", f"<p>{_summary(section)}</p>"]
    parts.append(_table(section))
    seeds = sorted({result["seed"] for group in section.groups for result in group.results})
    parts.append(
        f"<p class=note>{escape(metric.capitalize())}: on the validation part, {better} is better. Figures are mean ± "
        f"standard deviation over the seeds ({', '.join(map(str, seeds))}), bands one standard deviation either way.</p>"
    )
    parts.append(f"<div class=legend>{_legend(section.groups)}</div>")
    parts.append(f"<div class=charts>{''.join(_charts(section))}</div>")
    parts.append(_settings(section))
    return "".join(parts) + "</section>"


def _charts(section: Section) -> list[str]:
    groups = list(enumerate(section.groups))
    metric = Axis(section.metric.replace("_", " "), number)
    if section.metric in HIGHER_IS_BETTER:
        metric = Axis(metric.name, number, ends=(0.0, 1.0))
    entropy = section.task.get("text", {}).get("unigram_entropy")
    level = ("unigram entropy", entropy) if entropy is not None else None
    charts = []
    for title, name, x in (
        ("against training tokens", "training tokens", "tokens"),
        ("against training time", "seconds of training steps", "seconds"),
    ):
        lines = [_line(group, colour, group.against(x)) for colour, group in groups]
        drawn = line_chart([line for line in lines if line.x], Axis(name, number), metric, level)
        charts.append(_figure(f"{metric.name.capitalize()} {title}", drawn))
    for title, quantity, note in (
        ("Training speed", "train_tokens_per_second", "Tokens per second of the median step."),
        (
            "Decoding speed",
            "decode_tokens_per_second",
            f"Tokens per second, one sequence, from 0 to {section.task['seq_len']} tokens.",
        ),
    ):
        bars = [
            Bar(group.label, colour, *spread)
            for colour, group in groups
            if (spread := group.spread(quantity)) is not None
        ]
        if bars:
            charts.append(_figure(title, bar_chart(bars, title, number), note))
    return charts + [chart for arguments in CONTEXT_CHARTS if (chart := _context_chart(section, *arguments))]


CONTEXT_CHARTS: tuple[tuple[str, str, Form, str], ...] = (
    (
        "Decoding speed against context",
        "decode_tokens_per_second",
        number,
        "Tokens per second of the 32 steps behind a context, one sequence.",
    ),
    ("State size against context", "state_bytes", size, "What decoding one sequence carries along."),
    (
        "Training memory against context",
        "training_bytes",
        size,
        "What a forward pass over one sequence keeps for the backward pass, weights left out.",
    ),
)


def _context_chart(section: Section, title: str, quantity: str, form: Form, note: str) -> str | None:
    lines = [
        _line(group, colour, rows)
        for colour, group in enumerate(section.groups)
        if (rows := [(float(context), spread) for context, spread in group.at_contexts(quantity)])
    ]
    if not lines:
        return None
    ticks = sorted({x for line in lines for x in line.x})
    context = Axis("context, tokens", whole, log=True, ticks=ticks)
    name = title.split(" against")[0].lower()
    if quantity == "decode_tokens_per_second":
        axis = Axis(name, form, from_zero=True)
    else:
        axis = Axis(name, form, log=True, ticks=_binary_ticks(lines))
    return _figure(title, line_chart(lines, context, axis), note)


def _binary_ticks(lines: Sequence[Line]) -> list[float]:
    """Powers of four, which bytes read well at, no more than seven."""
    values = [mean for line in lines for mean in line.mean if mean > 0] or [1.0]
    powers = [p for p in range(0, 60, 2) if min(values) / 4 <= 2**p <= max(values) * 4]
    return [2.0**p for p in powers[:: -(-len(powers) // 7)]]


def _line(group: Group, colour: int, rows: Sequence[tuple[float, Spread]]) -> Line:
    return Line(
        group.label,
        colour,
        [x for x, _ in rows],
        [spread.mean for _, spread in rows],
        [spread.sd for _, spread in rows],
    )


def _figure(title: str, drawing: str, note: str = "") -> str:
    return f"<figure><figcaption><b>{escape(title)}</b> {escape(note)}</figcaption>{drawing}</figure>"


def _legend(groups: Sequence[Group]) -> str:
    return " ".join(
        f'<span><i class="c{number % COLOURS}"></i>{escape(group.label)}</span>'
        for number, group in enumerate(groups)
    )


def _summary(section: Section) -> str:
    """Who comes first, in a sentence each, and who is within a standard deviation of that."""
    metric, highest = section.metric.replace("_", " "), section.metric in HIGHER_IS_BETTER
    facts: tuple[tuple[str, str, str, Form, bool], ...] = (
        (f"{'Highest' if highest else 'Lowest'} {metric}", "metric", "", metric_form, highest),
        ("Fastest in training", "train_tokens_per_second", " tokens/s", number, True),
        ("Fastest in decoding", "decode_tokens_per_second", " tokens/s", number, True),
        ("Smallest state", "state_bytes", "", size, False),
    )
    said = []
    for words, quantity, unit, form, most in facts:
        known = [(spread, group.label) for group in section.groups if (spread := group.spread(quantity))]
        known.sort(key=lambda pair: pair[0].mean, reverse=most)
        if len(known) < 2:
            continue
        best, label = known[0]
        near = [name for spread, name in known[1:] if abs(spread.mean - best.mean) <= _widest(spread, best)]
        figure = form(best.mean) if quantity == "state_bytes" else with_sd(*best, form)
        how = "the same" if quantity == "state_bytes" else "no clear distance behind"
        behind = f" ({how}: {', '.join(near)})" if near else ""
        said.append(f"{words}: <b>{escape(label)}</b>, {figure}{unit}{escape(behind)}.")
    return " ".join(said)


def _widest(*spreads: Spread) -> float:
    return max(0.0 if math.isnan(spread.sd) else spread.sd for spread in spreads)


def _table(section: Section) -> str:
    forms = {"metric": metric_form, "state_bytes": size, "seconds": whole}
    heads = {**COLUMNS, "metric": section.metric.replace("_", " ")}.values()
    rows = []
    for colour, group in enumerate(section.groups):
        cells = [f'<th scope=row><i class="c{colour % COLOURS}"></i>{escape(group.label)}</th>']
        for quantity in COLUMNS:
            spread, form = group.spread(quantity), forms.get(quantity, number)
            exact = quantity in ("parameters", "state_bytes")
            figure = "none" if spread is None else form(spread.mean) if exact else with_sd(*spread, form)
            cells.append(f"<td>{figure}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    entropy = section.task.get("text", {}).get("unigram_entropy")
    if entropy is not None:
        rows.append(
            f"<tr class=level><th scope=row>unigram entropy</th><td>{entropy:.3f}</td><td colspan=5></td></tr>"
        )
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in heads)
    state = f"State: of one sequence after {section.task['seq_len']} tokens."
    return (
        f"<div class=scroll><table><thead><tr><th scope=col>mixer</th>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div><p class=note>{state}</p>"
    )


def _settings(section: Section) -> str:
    """Configuration, versions and machine of each folder."""
    parts = ["<h3>Settings, versions and machine</h3>"]
    for folder in section.folders:
        if len(section.folders) > 1:
            parts.append(f"<h4>{escape(str(folder.path))}</h4>")
        parts.append(
            "<div class=settings>" + "".join(_facts(*fact) for fact in _settings_of(folder)) + "</div>"
        )
        models = escape(json.dumps(folder.config["models"], indent=1))
        parts.append(f"<details><summary>Models, as JSON</summary><pre>{models}</pre></details>")
    return "".join(parts)


def _settings_of(folder: Folder) -> list[tuple[str, Mapping[str, Any]]]:
    comparison = dict(folder.config["comparison"])
    training = comparison.pop("training")
    task = dict(folder.config["task"])
    text = task.pop("text", {})
    return [
        ("Comparison", comparison),
        ("Training", training),
        ("Task", {**task, **{f"text: {key}": value for key, value in text.items()}}),
        ("Versions and machine", folder.config["environment"]),
    ]


def _facts(title: str, values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th scope=row>{escape(key.replace('_', ' '))}</th><td>{escape(_plain(value))}</td></tr>"
        for key, value in values.items()
    )
    return f"<table><caption>{escape(title)}</caption>{rows}</table>"


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _task_name(task: Mapping[str, Any]) -> str:
    return str(task["text"]["name"]) if "text" in task else str(task["name"])


def _title(task: Mapping[str, Any]) -> str:
    return f"Each next byte of {_task_name(task)}" if "text" in task else f"Task: {_task_name(task)}"
