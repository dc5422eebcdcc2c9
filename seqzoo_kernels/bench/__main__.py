"""The command ``python -m seqzoo_kernels.bench [OP]``."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from . import core, cpu, ops, output, timing


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of an op, or without an op the one of all ops on a CPU; write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m seqzoo_kernels.bench", description=__doc__)
    parser.add_argument("op", nargs="?", choices=ops.OPS, help="without it: all ops, in the shapes for a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--ways", default="", help="of each case, run the ways whose name contains this")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--cold", action="store_true", help="time first calls too, each in a fresh process")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--plot", type=Path, help="also plot time over T to this file")
    parser.add_argument("--rows", type=Path, help="plot the rows of this JSON instead of running anything")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if args.rows:
        rows = json.loads(args.rows.read_text())["rows"]
    elif args.op is None:
        rows = cpu.run(device, args.only, args.repeats)
    else:
        rows = []
        for case in ops.cases(args.op):
            case = dataclasses.replace(case, ways=[way for way in case.ways if args.ways in way.name])
            if args.only not in case.name or not case.ways:
                continue
            if case.large and device.type == "cpu":
                print(f"{case.name}: left out, it takes a GPU")
                continue
            row = core.run_case(case, device, args.repeats)
            for way in case.ways if args.cold and case.cold else ():
                if not row["ways"][way.name].get("why", "").startswith("not installed"):
                    row["ways"][way.name].update(timing.cold_start(args.op, case.name, way.name, device))
            rows.append(row)
            output.print_row(row)
            if device.type == "cuda":
                torch.cuda.empty_cache()
        missed = output.missed(rows)
        print(f"{len(rows)} cases, {len(missed)} missed" + "".join(f"\n    {text}" for text in missed))
    if args.json:
        output.write(args.json, rows, device)
    if args.plot:
        output.plot(args.plot, rows, args.op or "ops")


if __name__ == "__main__":
    main()
