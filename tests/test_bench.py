"""The bench of ops, small and on a CPU."""

import json

import pytest
import torch
from torch import Tensor

from seqzoo_kernels.bench import (
    attention,
    core,
    cpu,
    gated_linear_attention,
    linear_scan,
    ops,
    output,
    timing,
)
from seqzoo_kernels.bench.__main__ import main

CPU = torch.device("cpu")
FLEX = "flex_attention, gates constant"


def wrong(a: Tensor, x: Tensor) -> Tensor:
    return a * x


def refuses(a: Tensor, x: Tensor) -> Tensor:
    raise RuntimeError("not today")


def absent() -> core.Run:
    raise ImportError("No module named 'peer'")


@pytest.mark.parametrize("op", ops.OPS)
def test_cases_have_names_of_their_own(op):
    names = [case.name for case in ops.cases(op)]
    assert len(set(names)) == len(names) > 0
    assert all(case.ways[0].name == "ours" for case in ops.cases(op))


@pytest.mark.parametrize(
    "case",
    [
        linear_scan.real(2, 33, 4, torch.float32),
        linear_scan.real(2, 33, 4, torch.bfloat16),
        linear_scan.turning(2, 33, 4, "phase [D]"),
        linear_scan.turning(2, 33, 4, "decay [D], phase [D]"),
        linear_scan.turning(2, 33, 4, "phase [B, T, D]"),
    ],
    ids=lambda case: case.name,
)
def test_ours_is_judged_and_timed(case):
    row = core.run_case(case, CPU, 3)
    for name in ("ours", "torch associative_scan"):
        assert {core.FORWARD, core.BOTH, "error", "error of gradients"} <= row["ways"][name].keys(), row
    for name, way in row["ways"].items():
        assert "accelerated" not in name or "not installed" in way["why"]
    output.print_row(row)


@pytest.mark.parametrize("kind", ["forgetting", "forgetting, decay times of 10 to 1000", "softmax"])
def test_passes_of_attention_are_judged_and_timed(kind):
    row = core.run_case(attention.passes(kind, 1, 40, 2, 16, dtype=torch.float32), CPU, 3)
    ways = row["ways"]
    timed = [name for name in ways if core.BOTH in ways[name]]
    assert {"ours", "copy of as many bytes", "product of as many operations"} <= set(timed)
    assert "SDPA as torch chooses" in timed or kind != "softmax"
    for name, way in ways.items():
        assert name in timed or way["why"], name
    assert "GPU" in ways["ours in Triton"]["why"] if kind == "softmax" else "CPU" in ways[FLEX]["why"]
    output.print_row(row)


@pytest.mark.parametrize(("kind", "G"), [("forgetting", 2), ("softmax, grouped", 1)])
def test_steps_of_attention_are_judged_and_timed(kind, G):
    ways = core.run_case(attention.step(kind, 24, 2, G, 16, dtype=torch.float32), CPU, 3)["ways"]
    for way in ("ours", "ours by sdpa", "SDPA"):
        assert core.FORWARD in ways[way] and core.BOTH not in ways[way], ways


def test_a_way_without_all_gradients_is_judged_by_the_others():
    case = attention.passes("forgetting", 1, 9, 1, 4, dtype=torch.float32)

    def detached(*inputs: Tensor) -> Tensor:
        assert not inputs[3].requires_grad
        return case.ways[0].load()(*inputs)

    ways = [core.Way("ours", lambda: detached, constants=(3,))]
    row = core.run_case(core.Case(case.name, case.inputs, ways, case.exact, case.floor), CPU, 3)
    assert {"error of gradients", core.BOTH} <= row["ways"]["ours"].keys()


@pytest.mark.parametrize("kind", gated_linear_attention.FLA)
def test_passes_of_gated_linear_attention_are_judged_and_timed(kind):
    row = core.run_case(gated_linear_attention.passes(kind, 1, 40, 2, 8, 8, dtype=torch.float32), CPU, 3)
    ours, fla, softmax, _ = row["ways"].values()
    assert {core.FORWARD, core.BOTH, "error", "error of gradients"} <= ours.keys(), row
    assert "not installed" in fla["why"]
    assert {core.FORWARD, core.BOTH} <= softmax.keys() and "error" not in softmax
    assert softmax["why"].startswith("another function")
    output.print_row(row)


@pytest.mark.parametrize("kind", ["vector", "scalar"])
def test_steps_of_gated_linear_attention_are_judged_and_timed(kind):
    case = gated_linear_attention.step(kind, 2, 2, 8, 8, dtype=torch.float32)
    ours = core.run_case(case, CPU, 3)["ways"]["ours"]
    assert {core.FORWARD, "error"} <= ours.keys() and core.BOTH not in ours, ours


def test_a_cpu_leaves_out_what_is_too_large(monkeypatch, capsys):
    large = [gated_linear_attention.passes("no", 8, 2048, 16, 128, 128)]
    monkeypatch.setattr(ops, "cases", lambda op: large)
    main(["gated_linear_attention", "--device", "cpu"])
    assert "left out" in capsys.readouterr().out


def test_what_is_wrong_absent_or_refuses_is_not_timed():
    case = linear_scan.real(2, 9, 4, torch.float32)
    ways = [core.Way("ours", lambda: wrong), core.Way("refuses", lambda: refuses), core.Way("absent", absent)]
    row = core.run_case(core.Case(case.name, case.inputs, ways, case.exact, case.floor, (1.0, 1.0)), CPU, 3)
    assert [row["ways"][way.name]["why"] for way in ways] == [
        "wrong result",
        "RuntimeError: not today",
        "not installed: No module named 'peer'",
    ]
    assert not any(core.FORWARD in row["ways"][way.name] for way in ways)
    assert output.missed([row]) == [f"{case.name}: wrong result"]


def test_a_cold_start_has_a_process_of_its_own(monkeypatch):
    monkeypatch.setattr(timing, "COLD_SECONDS", 100)
    found = timing.cold_start("linear_scan", "over T: real [256, 512, 256] bfloat16", "no such way", CPU)
    assert "StopIteration" in found["why cold"]
    case = linear_scan.real(2, 9, 4, torch.float32)
    assert core.first_calls(case, "ours", CPU).keys() == {"first forward", "first forward and backward"}


def test_table_json_and_plot(tmp_path, monkeypatch, capsys):
    points = [linear_scan.real(1, T, 4, torch.float32, plotted=True) for T in (8, 16)]
    monkeypatch.setattr(ops, "cases", lambda op: points)
    json_file, plot_file = tmp_path / "rows.json", tmp_path / "plot.svg"
    main(["linear_scan", "--device", "cpu", "--repeats", "3", "--json", str(json_file)])
    assert "2 cases, 0 missed" in capsys.readouterr().out
    record = json.loads(json_file.read_text())
    assert record["versions"]["torch"] == torch.__version__ and len(record["rows"]) == 2
    main(["linear_scan", "--rows", str(json_file), "--plot", str(plot_file)])
    assert plot_file.read_text().startswith("<?xml")


def test_no_op_is_the_table_of_all(monkeypatch, capsys):
    real = cpu.cases()[0]
    monkeypatch.setattr(cpu, "cases", lambda: [real])
    main(["--device", "cpu", "--repeats", "3"])
    assert "real scan [4, 2048, 512]" in capsys.readouterr().out


def test_cases_and_ways_are_chosen_by_any_of_several_names(tmp_path, monkeypatch, capsys):
    points = [linear_scan.real(1, T, 4, torch.float32, plotted=True) for T in (8, 16, 32)]
    monkeypatch.setattr(ops, "cases", lambda op: points)
    json_file = tmp_path / "rows.json"
    chosen = ["--only", "[1, 8,", "--only", "[1, 32,", "--ways", "ours", "--ways", "torch"]
    main(["linear_scan", "--device", "cpu", "--repeats", "3", *chosen, "--json", str(json_file)])
    rows = json.loads(json_file.read_text())["rows"]
    assert [row["length"] for row in rows] == [8, 32]
    assert list(rows[0]["ways"]) == ["ours", "torch associative_scan", "copy of as many bytes"]
    main(["linear_scan", "--device", "cpu", "--seconds", "-1"])
    assert capsys.readouterr().out.count("left out, not begun") == 3


def test_what_a_run_found_is_kept_whatever_ends_it(tmp_path, capsys):
    times: list[dict[str, float]] = []
    log = output.Log(tmp_path / "rows.json", CPU, times=times)
    log.add(output.judged({"check": "right"}, lambda x: x / 3, 1.0))
    log.add(output.judged({"check": "wrong"}, absent))
    log.add({"ms": 1.5}, times)
    record = json.loads((tmp_path / "rows.json").read_text())
    right, missed = record["rows"]
    assert right == {"check": "right", "passed": True, "share of the allowed error": 0.333}
    assert missed["why"] == "ImportError: No module named 'peer'" and missed["where"].startswith("absent:")
    assert record["times"] == [{"ms": 1.5}]
    with pytest.raises(SystemExit, match="1"):
        log.finish()
    assert capsys.readouterr().out.endswith("1 passed, 1 failed\n")
