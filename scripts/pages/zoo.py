"""The zoo: an overview and a page for each registered mixer, from its docstring, docs/zoo.yml and recorded runs."""

import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

import seqzoo
from seqzoo.registry import MixerInfo

from .curves import curve_of, latest_comparison, speeds_of
from .diagram import diagram
from .records import Record
from .text import number, prose, size, table

ROOT = Path(__file__).parents[2]
DIM = 256  # the width at which sizes are given
LENGTHS = (1_000, 100_000)
FAMILIES = {
    "elementwise": "a state of one number a channel, or a few, that decays; training is a scan",
    "matrix": "a state of a matrix a head: keys write values, queries read them; training is chunked products",
    "softmax": "no state but the past itself: a cache that grows, or a window of it",
    "nonlinear": "gates that see the state, so training walks from token to token",
}


class Doc(NamedTuple):
    """The parts of a mixer's docstring."""

    summary: str
    prose: str
    options: Mapping[str, str]
    differences: str
    source: str


def entries(path: Path = ROOT / "docs" / "zoo.yml") -> dict[str, Any]:
    """What docs/zoo.yml says: name -> family, equation, diagram, arrows."""
    loaded: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    return loaded


def names() -> list[str]:
    """The mixers of this repository; a package that happens to be installed beside it has its own site."""
    return [n for n in seqzoo.list_mixers() if seqzoo.mixer_info(n).cls.__module__.startswith("seqzoo.")]


def pages(records: Sequence[Record]) -> dict[str, str]:
    """Path in docs -> Markdown."""
    known = entries()
    made = {f"zoo/{name}.md": mixer_page(name, known, records) for name in names()}
    return {"zoo/index.md": overview(known, records), **made}


def entry(name: str, known: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entry of a mixer.

    Raises:
        ValueError: there is none, or a part of it is missing.
    """
    wanted = {"family", "equation", "diagram", "arrows"}
    found = known.get(name)
    if found is None or set(found) != wanted or found["family"] not in FAMILIES:
        raise ValueError(
            f"docs/zoo.yml: expected an entry {name!r} with {', '.join(sorted(wanted))} and a family of {', '.join(FAMILIES)}, "
            f"got {found and sorted(found)}."
        )
    return found


def parse(cls: type) -> Doc:
    """The docstring of a mixer by its parts; the equation, which is indented, is left to docs/zoo.yml."""
    text = inspect.getdoc(cls) or ""
    summary, _, rest = text.partition("\n")
    parts = re.split(r"^(Args|Raises|Differences|Source):", rest, flags=re.M)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    body = re.sub(r"(?m)^    .*\n?", "", parts[0])
    arguments = re.findall(r"(?ms)^    (\w+): (.*?)(?=^    \w+: |\Z)", sections.get("Args", ""))
    return Doc(
        summary,
        "\n\n".join(_joined(p) for p in body.split("\n\n") if p.strip()),
        {**_inherited(cls), **{name: _joined(told) for name, told in arguments}},
        _joined(sections.get("Differences", "")),
        _joined(sections.get("Source", "")),
    )


def _inherited(cls: type) -> Mapping[str, str]:
    """What the docstring of a parent mixer says of its options, for a child that does not say it again."""
    (parent, *_) = cls.__bases__
    return (
        parse(parent).options
        if issubclass(parent, seqzoo.TokenMixer) and parent is not seqzoo.TokenMixer
        else {}
    )


def mixer_page(name: str, known: Mapping[str, Any], records: Sequence[Record]) -> str:
    """The page of one mixer."""
    info, told, doc = seqzoo.mixer_info(name), entry(name, known), parse(seqzoo.mixer_info(name).cls)
    mixer = seqzoo.create_mixer(name, DIM)
    flow = diagram(name, told["diagram"], told["arrows"])
    options = [
        (f"`{option}`", f"`{default!r}`", prose(doc.options.get(option, "")))
        for option, default in info.options.items()
    ]
    state = [
        (f"`{field}`", f"`{list(t.shape[1:])}`", str(t.dtype).removeprefix("torch."))
        for field, t in _fields(mixer.init_state(1))
    ]
    parts = [
        f"---\ntitle: {name}\ndescription: {doc.summary!r}\n---\n\n# {name}\n\n{prose(doc.summary)}\n",
        _facts(info, told, mixer),
        f"## Equation\n\n$$\n{told['equation'].strip()}\n$$\n\n{_told(doc.prose)}\n",
        f"## A step\n\n{flow}\n",
        "## Use it\n\n```python\nimport torch\nimport seqzoo\n\n"
        f'mixer = seqzoo.create_mixer("{name}", 64)\n'
        "y, state = mixer(torch.randn(2, 100, 64))  # [B, T, D]\n"
        "y_next, state = mixer.step(torch.randn(2, 64), state)  # one token further\n```\n",
        "## Options\n\n" + table(("option", "default", "what"), options),
        f"## State\n\nOf one sequence, at `dim={DIM}` with the default options, before the first token:\n\n"
        + table(("field", "shape", "dtype"), state),
        f"Bytes at that width: {_growth(info, mixer)}.\n",
        f"## Differences from other implementations\n\n{prose(doc.differences or 'None are noted.')}\n",
        f"## Source\n\n{_linked(prose(doc.source))}\n",
        "## Learning curve\n\n" + curve_of(name, records),
        "## Speed\n\n" + speeds_of(name, records),
    ]
    return "\n".join(parts)


def overview(known: Mapping[str, Any], records: Sequence[Record]) -> str:
    """The table of all mixers, which the page's script sorts and filters."""
    comparison = latest_comparison(records)
    rows = []
    for name in names():
        info, mixer = seqzoo.mixer_info(name), seqzoo.create_mixer(name, DIM)
        metric = comparison and comparison.metric(name)
        rows.append(
            (
                f"[`{name}`]({name}.md)",
                entry(name, known)["family"],
                f"`{info.op}`",
                info.growth,
                *(size(mixer.state_size(length)) for length in LENGTHS),
                number(sum(p.numel() for p in mixer.parameters()) / DIM**2),
                ", ".join(info.modes),
                number(metric) if metric else "–",
                _paper(info),
            )
        )
    head = [
        "mixer",
        "family",
        "op",
        "state grows",
        "state after 1,000 tokens",
        "after 100,000",
        "weights / D²",
    ]
    head += ["modes", comparison.metric_name if comparison else "bits per byte", "paper"]
    measured = (
        f"The column *{comparison.metric_name}* is from [a recorded comparison](../benchmarks/{comparison.record.stem}.md), "
        "in which all have the same width, depth and budget. It ranks small models after a short training, and no more."
        if comparison
        else "No comparison is recorded yet, so the column of what each reaches is empty."
    )
    return (
        "---\ntitle: The zoo\nhide: [toc]\n---\n\n# The zoo\n\n"
        f"All {len(names())} mixers, with their default options. Sizes are of one sequence in one layer at `dim={DIM}`, in "
        f"float32. Choose a column's head to sort; type to filter.\n\n{measured}\n\n"
        f'<div class="zoo-table" markdown>\n\n{table(head, rows)}\n</div>\n\n'
        "Families, by the recurrence:\n\n"
        + "".join(f"- **{name}**: {what}.\n" for name, what in FAMILIES.items())
        + "\nEvery mixer takes the width first and its options by keyword: `seqzoo.create_mixer('hgrn2', 512, num_heads=4)`. "
        "An option that several mixers have carries one name in all. `seqzoo list` and `seqzoo info NAME` print the same "
        "facts in a terminal. [What to pick](../start/choosing.md) has the figures behind a choice, and "
        "[Adding a mixer](../guides/adding-a-mixer.md) says how yours comes here.\n"
    )


def _facts(info: MixerInfo, told: Mapping[str, Any], mixer: seqzoo.TokenMixer) -> str:
    weights = sum(p.numel() for p in mixer.parameters())
    rows = [
        ("paper", _paper(info)),
        ("family", f"{told['family']}: {FAMILIES[told['family']]}"),
        ("op", f"[`{info.op}`](../reference/ops.md#seqzoo_kernels.{info.op}.{info.op})"),
        ("modes", ", ".join(info.modes)),
        ("state", f"{info.growth}; {_growth(info, mixer)} in float32 at `dim={DIM}`"),
        ("weights", f"{weights:,} at `dim={DIM}`, which is {number(weights / DIM**2)} D²"),
        ("reads from the stack", ", ".join(f"`{key}`" for key in info.cls.reads) or "nothing"),
        ("class", f"`{info.cls.__module__}.{info.cls.__qualname__}`"),
    ]
    return table(("", ""), [(f"**{key}**", value) for key, value in rows])


def _told(text: str) -> str:
    """The prose with a paragraph for each thing that all docstrings say."""
    text = re.sub(r"(?:^|(?<=\s))(Shapes|State|Weights): ", r"\n\n**\1.** ", prose(text))
    starts = (
        r"At the start|The phase starts|(?:Projections|All weights|Weights|Parameters)(?: and \w+)? start"
    )
    return re.sub(rf"(?:^|(?<=\s))(A step costs|{starts})\b", r"\n\n\1", text)


def _growth(info: MixerInfo, mixer: seqzoo.TokenMixer) -> str:
    if info.growth == "constant":
        return f"{size(mixer.state_size(1))} at any length"
    return ", ".join(f"{size(mixer.state_size(n))} after {n:,} tokens" for n in LENGTHS)


def _fields(state: Any, prefix: str = "") -> list[tuple[str, torch.Tensor]]:
    """The tensors of a state with their names; those of a state within it come after a dot."""
    found = []
    for name, part in zip(state._fields, state, strict=True):
        found += (
            [(prefix + name, part)] if isinstance(part, torch.Tensor) else _fields(part, f"{prefix}{name}.")
        )
    return found


def _paper(info: MixerInfo) -> str:
    return _linked(info.paper) or "–"


def _linked(text: str) -> str:
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def _joined(text: str) -> str:
    return " ".join(textwrap.dedent(text).split())
