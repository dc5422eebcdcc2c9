"""Pages of the recorded runs: each file in docs/benchmarks with its figures, machine, versions, date, and its command."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .plots import charts, tiles
from .records import Record, Row
from .text import cell, number, prose, table

MAX_ROWS = 120
META = {"curve", "date", "machine", "versions", "what", "threads", "environment", "device"}

BENCH = (
    "Each case is computed in several ways, of which the first is ours: milliseconds, errors against float64 relative to the "
    "largest entry, and memory beyond the inputs. Copies of as many bytes as must be read and written are the floor, and so "
    "is, where it takes longer, a matrix product of as many operations. What is absent or wrong is not timed, and its row says "
    "why."
)


class Kind(NamedTuple):
    """What a kind of record is about, and the command that makes it again."""

    title: str
    what: str
    rerun: str


KINDS = {
    "ops": Kind(
        "Speed of the ops",
        "Medians of forward and backward of each op, beside other ways to compute the same. Nothing is timed whose result is "
        "wrong: the error is the largest against float64, relative to the largest entry. The floor is the least ratio of a "
        "peer's time to ours that we set ourselves before measuring.",
        "python -m seqzoo_kernels.bench --json ops.json",
    ),
    "scan": Kind("Tiles of linear_scan", "", "python scripts/gpu_scan.py --only tiles"),
    "linear_scan": Kind(
        "linear_scan", BENCH, "python -m seqzoo_kernels.bench linear_scan --json linear_scan.json"
    ),
    "gated_linear_attention": Kind(
        "gated_linear_attention",
        BENCH,
        "python -m seqzoo_kernels.bench gated_linear_attention --json gated_linear_attention.json",
    ),
    "attention": Kind("attention", BENCH, "python -m seqzoo_kernels.bench attention --json attention.json"),
    "layers": Kind(
        "Training and decoding of whole models",
        "Language models of one mixer each, beside the same model in plain PyTorch and beside other libraries.",
        "seqzoo bench",
    ),
    "gpu_layers": Kind(
        "Layers on a GPU",
        "A training step and a step of decoding of single layers, beside flash-linear-attention's, in milliseconds and "
        "microseconds. Ours are judged against float64 first. What takes too long to prepare is given up, and its row says so.",
        "python scripts/gpu_layers.py --json gpu_layers.json",
    ),
    "gpu_rnn": Kind("lstm and gru on a GPU", "", "python scripts/gpu_rnn.py --json gpu_rnn.json"),
    "gates": Kind("Gates and norms on a GPU", "", "python scripts/gpu_gates.py; python scripts/gpu_norms.py"),
    "torchtitan": Kind("torchtitan on a GPU", "", "python scripts/gpu_torchtitan.py"),
    "parity": Kind("Learning curves of parity", "", "seqzoo compare --task parity"),
    "generation": Kind(
        "Decoding by context",
        "Tokens a second while one sequence is decoded behind contexts of several lengths, and the bytes of its state.",
        "python scripts/generation_speed.py",
    ),
    "contract": Kind(
        "The contract on a GPU",
        "Mixers on a GPU against float64, in float32 and bfloat16; that nothing waits for the device; a step as a CUDA graph.",
        "python scripts/gpu_check.py",
    ),
    "checks": Kind(
        "Kernels on a GPU against float64", "", "python scripts/gpu_gla.py; python scripts/gpu_attention.py"
    ),
    "compile": Kind(
        "torch.compile",
        "Seconds to the first result of a compiled mixer, its error, and how many graphs there are after each further length.",
        "python scripts/compile_battery.py",
    ),
    "kills": Kind(
        "Killed and resumed",
        "A training run is killed at random moments and resumed, then compared with one that nobody disturbed.",
        "python scripts/kill_battery.py",
    ),
    "laws": Kind(
        "The laws, at length",
        "The battery of the twelve laws on each mixer, with far more examples and seeds than the tests draw.",
        "python scripts/law_battery.py",
    ),
    "compare": Kind(
        "Learning curves",
        "Mixers trained with the same width, depth, budget, batches and seeds.",
        "seqzoo compare --out runs/first\npython scripts/condense_comparison.py runs/first compare.json",
    ),
    "plugins": Kind(
        "Other frameworks",
        "Each framework trains, dies, resumes and generates with each mixer.",
        "python scripts/plugin_battery.py",
    ),
}


def pages(records: Sequence[Record]) -> dict[str, str]:
    """Path in docs -> Markdown."""
    made = {f"benchmarks/{record.stem}.md": page(record) for record in records}
    return {"benchmarks/index.md": index(records), **made}


def title(record: Record) -> str:
    """Of a page and its line in the navigation."""
    kind = KINDS.get(record.kind)
    device = "H200" if "H200" in record.machine else "CPU" if "CPU" in record.machine else ""
    about = kind.title if kind else record.stem.replace("-", " ").capitalize()
    if kind and record.kind in (
        "laws",
        "ops",
        "compare",
    ):  # several files of a kind: what the name says beside date and device
        extra = (
            record.stem.replace(record.kind, "")
            .replace(record.date, "")
            .replace("cpu", "")
            .replace("h200", "")
        )
        extra = " ".join(extra.replace("-", " ").split())
        about += f": {extra}" if extra else ""
    return f"{about} ({device})" if device and device not in about else about


def index(records: Sequence[Record]) -> str:
    """All records, the newest first."""
    rows = [(f"[{title(r)}]({r.stem}.md)", r.date, prose(r.machine), prose(_versions(r))) for r in records]
    return (
        "---\ntitle: Benchmarks\n---\n\n# Benchmarks\n\n"
        "Every figure on this site comes from one of these recorded runs: a file that a script of the repository wrote, with "
        "the machine, the versions and the date. The pages are made from the files when the site is built. Each says how to "
        "run it again; on another machine the figures will be others.\n\n"
        + table(("run", "date", "machine", "versions"), rows)
        + _fastest(records)
        + "\n## How it is measured\n\n"
        "On a GPU, speeds are medians of replayed CUDA graphs where the page says so, which hold no launch of Python; copies "
        "of as many bytes are the floor that no kernel goes under. On a CPU they are medians of repeated calls, by turns with "
        "the peers.\n"
    )


def _fastest(records: Sequence[Record]) -> str:
    """What the ops take on GPUs, the newest record of each case."""
    rows: dict[str, tuple[Any, ...]] = {}
    for record in records:
        if "CPU" in record.machine:
            continue
        link = f"[{record.date}]({record.stem}.md)"
        op = (
            record.stem.split("-")[0].replace("scan", "linear_scan")
            if record.kind == "scan"
            else title(record)
        )
        for label, best, floor, peers in tiles(record):
            told = "; ".join(f"{prose(name)} {number(value)}" for name, value in peers.items())
            rows.setdefault(
                f"{op} {label}",
                (f"`{op}` {prose(label)}", best, floor, told or "–", prose(record.machine), link),
            )
        for row in record.rows("case", "ways"):
            if row.get("length"):  # a point of a chart on its own page
                continue
            ways = {
                name: way.get("forward and backward", way.get("forward")) for name, way in row["ways"].items()
            }
            timed = {name: value for name, value in ways.items() if isinstance(value, int | float)}
            ours = next(iter(row["ways"]))
            floor = next((value for name, value in timed.items() if name.startswith("cop")), None)
            told = "; ".join(
                f"{prose(n)} {number(v)}" for n, v in timed.items() if n != ours and not n.startswith("cop")
            )
            if ours in timed:
                rows.setdefault(
                    row["case"],
                    (prose(row["case"]), timed[ours], floor, told or "–", prose(record.machine), link),
                )
    if not rows:
        return ""
    head = ("op and shape", "ours", "copies of as many bytes", "others", "machine", "record")
    return "\n## Ops on a GPU\n\nForward and backward, milliseconds; less is better.\n\n" + table(
        head, rows.values()
    )


def page(record: Record) -> str:
    """One record: what it is, its charts, and all its rows. What is not known is shown as it lies in the file."""
    kind = KINDS.get(record.kind)
    meta = [("date", record.date), ("machine", prose(record.machine)), ("versions", prose(_versions(record)))]
    meta += [(prose(k), cell(v)) for k, v in record.data.items() if k not in META and not _long(v)]
    meta.append(("file", f"[{record.stem}.json]({record.stem}.json)"))
    what = record.data.get("what") or (kind.what if kind else "")
    parts = [
        f"---\ntitle: {title(record)!r}\n---\n\n# {title(record)}\n",
        f"{prose(str(what))}\n" if what else "A record of a kind that this site has no charts for.\n",
        table(("", ""), [(f"**{k}**", v) for k, v in meta]),
        f"Run it again:\n\n```bash\n{kind.rerun}\n```\n" if kind else "",
        charts(record),
    ]
    for name, value in record.data.items():
        if name in META or not _long(value):
            continue
        if name == "mixers":
            parts.append(f"## Mixers\n\n{_mixers(value)}")
            continue
        heading = {"rows": "Rows", "figures": "Figures"}.get(name, name.capitalize())
        parts.append(f"## {prose(heading)}\n\n{_rows(value)}")
    return "\n".join(part for part in parts if part)


def _versions(record: Record) -> str:
    return (
        ", ".join(f"{k} {v}" for k, v in record.versions.items() if k not in ("date", "machine"))
        or "not recorded"
    )


def _long(value: Any) -> bool:
    """Whether a value has a section of its own."""
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], dict | list)
    return isinstance(value, dict) and any(isinstance(v, dict) for v in value.values())


def _rows(value: Any) -> str:
    if isinstance(value, Mapping):
        return table(("", ""), [(prose(str(k)), cell(v)) for k, v in value.items()])
    if not isinstance(value[0], dict):
        return cell(value) + "\n"
    if {"mixer", "seed", "examples", "failures"} <= value[0].keys():
        return _battery(value)
    if "ways" in value[0]:
        value = [
            {"case": row["case"], "way": name, **way} for row in value for name, way in row["ways"].items()
        ]
    columns = [k for k in dict.fromkeys(k for row in value for k in row) if k != "curve"]
    told = [[_cell(k, row.get(k)) for k in columns] for row in value[:MAX_ROWS]]
    rest = f"\n{len(value) - MAX_ROWS} more are in the file.\n" if len(value) > MAX_ROWS else ""
    return table([prose(c.replace("_", " ")) for c in columns], told) + rest


def _mixers(value: Mapping[str, Mapping[str, Any]]) -> str:
    """What each mixer of a comparison reached and is."""
    head = [k for k in next(iter(value.values())) if k != "curves"]
    told = [[f"`{name}`", *(_figure(mixer.get(k)) for k in head)] for name, mixer in value.items()]
    return table(["mixer", *(prose(k.replace("_", " ")) for k in head)], told)


def _figure(value: Any) -> Any:
    if isinstance(value, Mapping) and "mean" in value:
        return f"{value['mean']:.3f}" + (f" ± {value['sd']:.3f}" if value.get("sd") is not None else "")
    return value


def _cell(name: str, value: Any) -> str:
    if isinstance(value, list) and len(value) > 8:
        return f"{len(value)} entries"
    if name in ("mixer", "case"):
        return f"`{value}`"
    return cell(value)


def _battery(rows: Sequence[Row]) -> str:
    """Rows of the law battery, added up by mixer."""
    told = []
    for mixer in dict.fromkeys(row["mixer"] for row in rows):
        mine = [row for row in rows if row["mixer"] == mixer]
        failures = sum(len(row["failures"]) for row in mine)
        told.append(
            (
                f"`{mixer}`",
                len(mine),
                sum(row["examples"] for row in mine),
                failures,
                sum(r["seconds"] for r in mine),
            )
        )
    return table(("mixer", "runs", "examples", "failures", "seconds"), told)
