"""Test any mixer on the laws: `check_mixer("package.module:Class")`. Needs hypothesis."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from seqzoo.errors import closest

from .law import LAWS, LawViolation
from .subject import Mixer, Subject, importable, subject

if TYPE_CHECKING:
    from .examples import Examples

BUDGETS = {"quick": 2, "thorough": 40}  # examples drawn for each dtype and mode
SHRINKING = 10.0  # seconds to look for a smaller example


@dataclass(frozen=True)
class Row:
    """What became of one law.

    outcome    "pass", "fail" or "skip"
    note       what was left out and why
    seconds    how long it took
    examples   how many were tried
    violation  of a law that is broken
    """

    law: str
    outcome: str
    note: str = ""
    seconds: float = 0.0
    examples: int = 0
    violation: LawViolation | None = None


@dataclass(frozen=True)
class Report:
    """What became of each law; as text, a table."""

    mixer: str
    rows: tuple[Row, ...]

    @property
    def failures(self) -> tuple[LawViolation, ...]:
        return tuple(row.violation for row in self.rows if row.violation is not None)

    def __str__(self) -> str:
        wide = max(len(row.law) for row in self.rows) if self.rows else 0
        lines = [f"{'law':{wide}}  result  seconds  examples"]
        for row in self.rows:
            line = f"{row.law:{wide}}  {row.outcome:6}  {row.seconds:7.1f}  {row.examples:8}  {row.note}"
            lines.append(line.rstrip())
        return "\n".join([self.mixer, *lines])


def check_mixer(
    mixer: Mixer,
    *,
    options: Mapping[str, Any] | None = None,
    laws: Collection[str] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    devices: Sequence[str] | None = None,
    budget: str = "quick",
    seed: int = 0,
) -> Report:
    """Test a mixer on the laws; the first that it breaks is raised.

    Args:
        mixer: a registered name, a TokenMixer class, "package.module:Class", "path/to/file.py:Class", or a function without
            arguments that builds one.
        options: of the mixer, where it is no function.
        laws: the names in `LAWS` to test; by default all.
        dtypes: instead of those that each law is about.
        devices: by default the CPU.
        budget: "quick", or "thorough", which draws twenty times as many examples and goes to a thousand tokens.
        seed: of weights, tokens and examples.

    Raises:
        LawViolation: which law is broken, the smallest example found, by how much, and two lines that show it again.
        ValueError, TypeError, ImportError: there is no such mixer, law or budget; hypothesis is missing.
    """
    tested = subject(mixer, options)
    rows = []
    for row in check_laws(tested, laws=laws, dtypes=dtypes, devices=devices, budget=budget, seed=seed):
        if row.violation is not None:
            raise row.violation from row.violation.__cause__
        rows.append(row)
    return Report(tested.name, tuple(rows))


def check_laws(
    tested: Subject,
    *,
    laws: Collection[str] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    devices: Sequence[str] | None = None,
    budget: str = "quick",
    seed: int = 0,
) -> Iterator[Row]:
    """`check_mixer` without stopping: the row of each law as soon as it is known."""
    if budget not in BUDGETS:
        raise ValueError(
            f"expected budget to be one of {', '.join(BUDGETS)}, got {budget!r}{closest(budget, BUDGETS)}"
        )
    if isinstance(laws, str):
        raise TypeError(f"expected laws to be several names, got the string {laws!r}.")
    for law in laws or ():
        if law not in LAWS:
            raise ValueError(f"no law is called {law!r}{closest(law, LAWS)} Known: {', '.join(LAWS)}.")
    examples = _examples()
    places = [tested.on(device) for device in devices or ["cpu"]]
    return (
        _row(places, law, examples[law], dtypes, budget, seed) for law in LAWS if laws is None or law in laws
    )


def _examples() -> Mapping[str, "Examples"]:
    try:
        from .examples import EXAMPLES
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise ImportError('testing a mixer needs hypothesis: pip install "seqzoo[testing]"') from error
    return EXAMPLES


def _row(
    places: Sequence[Subject],
    law: str,
    examples: "Examples",
    dtypes: Sequence[torch.dtype] | None,
    budget: str,
    seed: int,
) -> Row:
    start = time.perf_counter()
    count, notes, found = 0, [], None
    for place in places:
        always, note = _possible(law, examples.always, place)
        notes.append(note)
        modes = _modes(law, examples, place)
        long = examples.long if budget == "thorough" else ()
        for dtype in dtypes or examples.dtypes if always else ():
            for mode in modes:
                trial = _Trial(place, law, {"dtype": dtype, **mode})
                found = trial.of_all([{"seed": seed} | example for example in (*always, *long)])
                if found is None and examples.drawn is not None:
                    found = trial.of_drawn(examples.drawn, BUDGETS[budget], seed)
                elif found is not None and examples.drawn is not None:
                    found = trial.smaller(found, examples.drawn, seed)
                count += trial.count
                if found is not None:
                    seconds = time.perf_counter() - start
                    found.script = place.script(law, found.example)
                    return Row(law, "fail", "", seconds, count, found.with_traceback(None))
    note = "; ".join(sorted({note for note in notes if note}))
    return Row(law, "pass" if count else "skip", note, time.perf_counter() - start, count)


@dataclass
class _Trial:
    """One law on one mixer with some arguments fixed."""

    place: Subject
    law: str
    fixed: dict[str, Any]
    count: int = 0

    def of(self, example: Mapping[str, Any]) -> LawViolation | None:
        self.count += 1
        try:
            LAWS[self.law](self.place.make, **{**self.fixed, **example})
        except LawViolation as violation:
            return violation
        return None

    def of_all(self, examples: Sequence[Mapping[str, Any]]) -> LawViolation | None:
        return next(filter(None, map(self.of, examples)), None)

    def of_drawn(self, drawn: Any, most: int, seed: int) -> LawViolation | None:
        """The smallest example that breaks the law, of `most` drawn ones and what hypothesis shrinks them to."""
        import hypothesis
        from hypothesis import HealthCheck, Phase, Verbosity

        best: LawViolation | None = None
        stop = 0.0

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=most,
            phases=[Phase.generate, Phase.shrink],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
            report_multiple_bugs=False,
        )
        @hypothesis.given(drawn)
        def search(example: dict[str, Any]) -> None:
            nonlocal best, stop
            if stop and time.perf_counter() > stop:
                raise _LongEnough
            found = self.of(example)
            if found is None:
                return
            stop = stop or time.perf_counter() + SHRINKING
            if best is None or _size(found) < _size(best):
                best = found
            raise found

        with suppress(LawViolation, _LongEnough):
            search()
        return best

    def smaller(self, found: LawViolation, drawn: Any, seed: int) -> LawViolation:
        """A smaller example than `found`, if drawing shows one."""
        other = self.of_drawn(drawn, 20, seed)
        return found if other is None or _size(found) <= _size(other) else other


class _LongEnough(BaseException):
    """Ends a search; not an Exception, which hypothesis would take for a failure of the law."""


def _size(violation: LawViolation) -> tuple[int, int]:
    """Tokens of an example, then how long it is to read."""
    example = violation.example
    tokens = example.get("length", 17) * example.get("batch", 2)
    if "lengths" in example:
        tokens = sum(example["lengths"]) + example["tail"]
    if "mask" in example:
        tokens = sum(map(len, example["mask"]))
    return tokens, len(repr(example))


def _modes(law: str, examples: "Examples", place: Subject) -> list[dict[str, str]]:
    """The modes to try, as arguments of the law."""
    if not examples.modes:
        return [{}]
    modes = type(place.make()).modes
    return [{"mode": mode} for mode in (*modes, *["step"] * examples.step)]


def _possible(law: str, examples: Sequence[dict[str, Any]], place: Subject) -> tuple[list[dict], str]:
    """The examples that can be tried here, and why the others can't."""
    from torch._dynamo.eval_frame import is_dynamo_supported

    mixer = place.make()
    device = next((p.device.type for p in mixer.parameters()), "cpu")
    reasons: dict[str, Callable[[dict[str, Any]], bool]] = {}
    if law == "modes_agree" and "recurrent" not in type(mixer).modes:
        reasons["no recurrent mode to compare with"] = lambda example: True
    if law == "compiles" and not is_dynamo_supported():
        reasons["torch.compile does not run here"] = lambda example: True
    if law == "round_trips":
        if device != "cpu":
            reasons[f"tested on the CPU, not on {device}"] = lambda example: True
        if not importable(type(mixer)):
            by_name = ("config", "torch.save")
            reasons["config, torch.save: the class can't be imported"] = lambda e: e["way"] in by_name
        if not importable(type(mixer.init_state(0))):
            reasons["state: its class can't be imported"] = lambda e: e["way"] == "state"
        try:
            import safetensors  # noqa: F401
        except ModuleNotFoundError:
            reasons["safetensors is not installed"] = lambda e: e["way"] == "safetensors"
    left = [e for e in examples if not any(applies(e) for applies in reasons.values())]
    return left, "; ".join(reasons)
