"""The command ``python -m seqzoo_kernels.bench [OP]``."""

import argparse
import dataclasses
import functools
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from . import core, cpu, ops, output, timing


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of an op, or without an op the one of all ops on a CPU; write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m seqzoo_kernels.bench", description=__doc__)
    parser.add_argument("op", nargs="?", choices=ops.OPS, help="without it: all ops, in the shapes for a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--only", action="append", help="run the cases whose name contains this; may be repeated"
    )
    parser.add_argument(
        "--ways", action="append", help="of each case, run the ways whose name contains this; likewise"
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no case of an op after that many"
    )
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
        rows = cpu.run(device, functools.partial(_asked, args.only), args.repeats)
    else:
        rows, start = [], time.monotonic()
        for case in ops.cases(args.op):
            case = dataclasses.replace(case, ways=[way for way in case.ways if _asked(args.ways, way.name)])
            if not _asked(args.only, case.name) or not case.ways:
                continue
            if case.large and device.type == "cpu":
                print(f"{case.name}: left out, it takes a GPU")
                continue
            if time.monotonic() - start > args.seconds:
                print(f"{case.name}: left out, not begun after {args.seconds:.0f} s")
                continue
            row = core.run_case(case, device, args.repeats)
            for way in case.ways if args.cold and case.cold else ():
                if not row["ways"][way.name].get("why", "").startswith("not installed"):
                    row["ways"][way.name].update(timing.cold_start(args.op, case.name, way.name, device))
            rows.append(row)
            output.print_row(row)
            if args.json:  # after each: whatever ends the run leaves what was measured
                output.write(args.json, rows, device)
            if device.type == "cuda":
                torch.cuda.empty_cache()
        missed = output.missed(rows)
        print(f"{len(rows)} cases, {len(missed)} missed" + "".join(f"\n    {text}" for text in missed))
    if args.json:
        output.write(args.json, rows, device)
    if args.plot:
        output.plot(args.plot, rows, args.op or "ops")


def _asked(parts: list[str] | None, name: str) -> bool:
    return parts is None or any(part in name for part in parts)


if __name__ == "__main__":
    main()
