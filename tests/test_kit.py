"""The kit that tests any mixer: right ones pass, planted faults are caught by name, from Python, a shell and pytest."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import planted
import pytest
import torch
from right_mixers import EMA, Weightless

import seqzoo
from seqzoo.cli import main
from seqzoo.testing import LAWS, LawViolation, MixerLaws, Report, check_mixer
from seqzoo.testing.examples import EXAMPLES
from seqzoo.testing.kit import check_laws
from seqzoo.testing.law import SCREEN, arguments, code, rows_of
from seqzoo.testing.subject import subject

ROOT = Path(__file__).parent.parent

RIGHT = '''
"""A mixer in a file: h_t = a h_{t-1} + x_t."""

from typing import NamedTuple

import torch
from torch import Tensor

import seqzoo
from seqzoo_kernels import linear_scan


class SumState(NamedTuple):
    h: Tensor


class Sum(seqzoo.TokenMixer):
    """A leaky sum."""

    def __init__(self, dim: int, *, rate: float = 0.5) -> None:
        super().__init__(dim)
        self.log_decay = torch.nn.Parameter(torch.full((dim,), -rate))

    def init_state(self, batch, capacity=None):
        return SumState(self.zeros(batch, self.dim))

    def mix(self, x, state, *, pack, mode, shared):
        log_decay = self.log_decay.to(state.h.dtype)
        h, final = linear_scan(
            log_decay, x.to(state.h.dtype), initial_state=state.h, cu_seqlens=pack.cu_seqlens, mode=mode
        )
        return h.to(x.dtype), SumState(final)


class Peeks(Sum):
    def mix(self, x, state, *, pack, mode, shared):
        y, state = super().mix(x, state, pack=pack, mode=mode, shared=shared)
        return y + x.sum(1, keepdim=True), state
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(RIGHT)
    return path


@pytest.fixture
def cli(capsys, monkeypatch):
    """Runs a command line; its status, stdout and stderr."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments):
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return stopped.value.code, output.out, output.err

    return run


def in_pytest(folder, *arguments):
    """pytest in a process of its own, with the plugin and nothing of ours."""
    path = os.pathsep.join([str(ROOT), str(folder)])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]
    if not any("pytest_seqzoo" in str(p) for p in _installed_plugins()):
        command += ["-p", "pytest_seqzoo"]
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    return run.returncode, run.stdout + run.stderr


def _installed_plugins():
    from importlib.metadata import entry_points

    return [point.value for point in entry_points(group="pytest11")]


class TestCheckMixer:
    def test_every_law_has_examples(self):
        assert list(EXAMPLES) == list(LAWS)

    def test_a_right_mixer_passes(self):
        report = check_mixer(EMA)
        assert isinstance(report, Report)
        assert [row.law for row in report.rows] == list(LAWS)
        assert {row.outcome for row in report.rows} == {"pass"}
        assert all(row.examples and row.seconds > 0 for row in report.rows)
        assert len(str(report).splitlines()) == 2 + len(LAWS)
        with pytest.raises(dataclasses.FrozenInstanceError):
            report.subject = "another"

    def test_a_mixer_may_have_no_weights(self):
        assert {row.outcome for row in check_mixer(Weightless).rows} == {"pass"}

    def test_no_step_is_no_fault(self):
        """Of two rows one has a slot that holds nothing, whose gradient is not attention's where no step is made."""
        drawn = {"batch": 2, "length": 0, "history": 1, "dtype": torch.float32, "seed": 0}
        LAWS["modes_agree"](lambda: seqzoo.create_mixer("attention", 16), mode="step", **drawn)

    def test_the_example_is_small(self):
        with pytest.raises(LawViolation) as caught:
            check_mixer(planted.LooksOneStepAhead, laws=["causality"])
        assert caught.value.example["length"] == 2
        assert caught.value.example["cut"] == 1
        assert caught.value.measured > caught.value.allowed

    @pytest.mark.parametrize("fault", [planted.KeepsStateInBfloat16, planted.LooksOneStepAhead])
    def test_all_rows_are_collected(self, fault):
        rows = list(check_laws(subject(fault), laws=["errors", "causality", "precision"]))
        assert [row.law for row in rows] == ["causality", "precision", "errors"]
        assert next(row for row in rows if row.law == planted.FAULTS[fault]).outcome == "fail"
        assert rows[-1].outcome == "pass"

    def test_the_same_seed_finds_the_same(self):
        def found(seed):
            (row,) = check_laws(subject(planted.MixesRows), laws=["rows"], seed=seed)
            return row.violation.example, row.examples

        assert found(3) == found(3)

    def test_a_name_options_and_a_factory(self):
        assert check_mixer("gla", options={"num_heads": 2}, laws=["rows"]).rows[0].outcome == "pass"
        factory = lambda: seqzoo.create_mixer("hgru_real", 16)  # noqa: E731
        assert check_mixer(factory, laws=["rows"]).rows[0].outcome == "pass"

    def test_options_are_drawn_too(self):
        class MixesRowsIfAsked(EMA):
            def __init__(self, dim, *, half_life=8.0, mixing: bool = False):
                super().__init__(dim, half_life=half_life)
                self.mixing = mixing

            def mix(self, x, state, **rest):
                return super().mix(x + self.mixing * x.sum(0), state, **rest)

        (row,) = check_laws(subject(MixesRowsIfAsked), laws=["rows"], budget="thorough")
        assert "mixing=True" in row.violation.script
        (row,) = check_laws(subject(MixesRowsIfAsked, {"mixing": False}), laws=["rows"], budget="thorough")
        assert row.outcome == "pass"

    def test_time_bounds_what_is_drawn(self):
        (all_of_them,) = check_laws(subject(EMA), laws=["rows"])
        (few,) = check_laws(subject(EMA), laws=["rows"], seconds=1e-6)
        assert few.examples < all_of_them.examples
        assert few.outcome == "pass"

    def test_only_its_modes_are_tested(self):
        class Recurrent(EMA):
            modes = ("recurrent",)

        class Chunked(EMA):
            modes = ("chunked",)

        one, three = (check_mixer(m, laws=["rows"]).rows[0].examples for m in (Recurrent, EMA))
        assert 0 < one < three
        (row,) = check_mixer(Chunked, laws=["modes_agree"]).rows
        assert (row.outcome, row.note) == ("skip", "no recurrent mode to compare with")
        (row,) = check_mixer(Recurrent, laws=["round_trips"]).rows
        assert (row.outcome, row.note) == ("pass", "config, torch.save: the class can't be imported")

    @pytest.mark.parametrize(
        ("mixer", "options", "words"),
        [
            ("glaa", {}, "'gla'"),
            ("gla", {"laws": ["spliting"]}, "did you mean 'splitting'"),
            ("gla", {"budget": "quik"}, "did you mean 'quick'"),
            ("gla", {"options": {"num_head": 2}}, "did you mean 'num_heads'"),
            ("gla", {"laws": "splitting"}, "several names"),
            ("no_such_package:Mixer", {}, "can't be imported"),
            ("seqzoo:Mixr", {}, "no mixer 'Mixr'"),
            ("nowhere.py:Mixer", {}, "no file 'nowhere.py'"),
            (lambda: torch.nn.Identity(), {}, "Identity, expected a TokenMixer"),
            (3, {}, "got int"),
        ],
    )
    def test_what_is_wrong_is_said(self, mixer, options, words):
        with pytest.raises((ValueError, TypeError), match=words):
            check_mixer(mixer, **options)

    def test_hypothesis_may_be_missing(self):
        code = """
import sys
sys.modules["hypothesis"] = None
import seqzoo.testing.laws, seqzoo.testing
try:
    seqzoo.testing.check_mixer("gla")
except ImportError as error:
    print(error)
"""
        run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert 'pip install "seqzoo[testing]"' in run.stdout, run.stderr


class TestMessage:
    @pytest.mark.parametrize(
        "value",
        [
            "0" * 500 + "1" * 500,
            ("1" * 250 + "0" * 500 + "1" * 250, "0" * 1000),
            "0110" * 20,
            (3,),
            (),
            "auto",
        ],
    )
    def test_an_example_is_python(self, value):
        text = code(value)
        assert eval(text) == value
        assert len(text) <= 100

    def test_it_fits_one_screen_whatever_broke(self):
        violation = LawViolation("\n".join(["a compiler speaks " * 50] * 100))
        violation.law, violation.rule = "padding", "A rule. " * 15
        violation.example = EXAMPLES["padding"].long[0]
        violation.script = f"import seqzoo\nLAWS['padding'](make, {arguments(violation.example)})"
        assert rows_of(str(violation)) <= SCREEN[0]
        assert "and 9" in str(violation)
        assert violation.script in str(violation).replace("\n    ", "\n")

    def test_a_mask_of_a_thousand_tokens_is_reproduced(self):
        check = subject(planted.PadsDecayTheState).test
        with pytest.raises(LawViolation) as caught:
            check("padding", {}, EXAMPLES["padding"].long[0])
        assert rows_of(str(caught.value)) <= SCREEN[0]
        with pytest.raises(LawViolation, match=r"^padding: "):
            exec(caught.value.script, {})

    def test_options_that_were_drawn_are_in_the_script(self):
        with pytest.raises(LawViolation) as caught:
            subject("gla").test("rows", {"index": (0,)}, {"options": {"num_heads": 2}, "batch": "two"})
        assert "create_mixer('gla', 16, chunk_size=16, num_heads=2)" in caught.value.script


class TestCommand:
    def test_a_right_mixer(self, cli, file):
        status, out, _ = cli("check", f"{file}:Sum", "--option", "rate=0.25")
        assert status == 0, out
        assert all(f"{law} " in out for law in LAWS)
        assert "fail" not in out

    def test_a_broken_mixer(self, cli, file):
        status, out, _ = cli("check", f"{file}:Peeks", "--law", "causality", "--law", "errors")
        assert status == 1
        table, _, message = out.partition("\n\n")
        assert "causality  fail" in table
        assert "errors     pass" in table
        assert message.startswith("causality: y")
        script = message.partition("again:\n")[2]
        with pytest.raises(LawViolation, match=r"^causality: "):
            exec("\n".join(line.strip() for line in script.splitlines()), {})

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["glaa"], "did you mean 'gla'"),
            (["gla", "--law", "spliting"], "did you mean 'splitting'"),
            (["gla", "--option", "num_head=2"], "did you mean 'num_heads'"),
            (["gla", "--option", "num_heads"], "expected name=value"),
            (["gla", "--budget", "quik"], "did you mean 'quick'"),
            (["FILE:Sun"], "it has Sum, Peeks"),
            (["BROKEN:Sum"], "could not be imported: ZeroDivisionError"),
        ],
    )
    def test_what_is_wrong_is_one_line(self, cli, file, tmp_path, arguments, words):
        broken = tmp_path / "broken.py"
        broken.write_text("1 / 0")
        places = {"FILE": str(file), "BROKEN": str(broken)}
        first, *rest = arguments
        for name, place in places.items():
            first = first.replace(name, place)
        status, out, err = cli("check", first, *rest)
        assert (status, out) == (1, "")
        assert words in err
        assert len(err.splitlines()) == 1


class TestEMA(MixerLaws):
    """The laws as tests, as in a suite of someone else."""

    mixer = EMA


class Factory(MixerLaws):
    def mixer():
        return EMA(16)


class Broken(MixerLaws):
    mixer = planted.LooksOneStepAhead


def test_a_class_of_tests_takes_a_function_as_it_is():
    Factory().test_errors()


def test_a_class_of_tests_catches_a_fault():
    Broken().test_errors()
    with pytest.raises(LawViolation, match=r"^causality: "):
        Broken().test_causality()


class TestPlugin:
    def test_an_item_a_law(self, file):
        status, out = in_pytest(file.parent, "--seqzoo-mixer=mine:Peeks", "-k", "causality or rows")
        assert status == 1, out
        assert "1 failed, 1 passed, 10 deselected" in out
        assert "causality: y" in out
        assert "Traceback" not in out

    def test_a_misspelt_mixer(self, file):
        status, out = in_pytest(file.parent, "--seqzoo-mixer=mine:Sun")
        assert status == 4
        assert "no mixer 'Sun'" in out

    def test_it_costs_other_projects_nothing(self, tmp_path):
        (tmp_path / "test_other.py").write_text(
            "import sys\n\ndef test_other():\n    assert not {'torch', 'seqzoo', 'hypothesis'} & set(sys.modules)\n"
        )
        status, out = in_pytest(tmp_path, "-p", "no:hypothesispytest")
        assert status == 0, out
