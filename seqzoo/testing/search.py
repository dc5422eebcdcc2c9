"""Look for the smallest example that breaks a law: the ones that no run leaves out, then drawn ones. Needs hypothesis."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from seqzoo.errors import closest

from .law import LawViolation, Untestable
from .report import Row

BUDGETS = {"quick": 2, "thorough": 40}  # examples drawn for each dtype and mode
SHRINKING = 10.0  # seconds to look for a smaller example

Check = Callable[[Mapping[str, Any]], None]  # raises a LawViolation, its script filled in, or Untestable


@dataclass
class Search:
    """One law on one subject. `until` is the time, as of time.perf_counter, after which nothing more is drawn."""

    law: str
    seed: int
    drawn: int
    until: float = float("inf")
    count: int = 0
    notes: set[str] = field(default_factory=set)
    start: float = field(default_factory=time.perf_counter)

    def row(self, found: LawViolation | None) -> Row:
        """What became of the law."""
        seconds, note = time.perf_counter() - self.start, "; ".join(sorted(filter(None, self.notes)))
        if found is not None:
            return Row(self.law, "fail", "", seconds, self.count, found.with_traceback(None))
        return Row(self.law, "pass" if self.count else "skip", note, seconds, self.count)

    def run(
        self, check: Check, always: Sequence[Mapping[str, Any]], drawn: Any, shift: int = 0
    ) -> LawViolation | None:
        """The smallest violation found, None if there is none; `drawn` is a strategy, or None.

        Runs with the same `shift` draw the same examples.
        """
        lies_in_memory = any("poisoned" in example for example in always)
        found = None
        example: Mapping[str, Any]
        for example in ({"seed": self.seed} | dict(given) for given in always):
            found = self._try(check, example)
            if found is not None:
                found = self._steady(check, found, example) if lies_in_memory else found
                break
        if drawn is None:
            return found
        other, example = self._try_drawn(check, drawn, shift, self.drawn if found is None else 20)
        if other is not None and lies_in_memory:
            other = self._steady(check, other, example)
        if found is None or other is None:
            return found or other
        # what only sometimes breaks is no better an example
        shows_it = _size(other) < _size(found) and self._try(check, example) is not None
        return other if shows_it else found

    def _steady(self, check: Check, found: LawViolation, example: Mapping[str, Any]) -> LawViolation:
        """The same in memory full of NaN, where that shows another error: what memory happens to hold may show none."""
        poisoned = self._try(check, {**example, "poisoned": True})
        return found if poisoned is None or poisoned.measured == found.measured else poisoned

    def _try(self, check: Check, example: Mapping[str, Any]) -> LawViolation | None:
        try:
            check(example)
        except LawViolation as violation:
            self.count += 1
            return violation
        except Untestable as reason:
            self.notes.add(str(reason))
            return None
        self.count += 1
        return None

    def _try_drawn(
        self, check: Check, drawn: Any, shift: int, most: int
    ) -> tuple[LawViolation | None, Mapping[str, Any]]:
        """The smallest example that breaks the law, of `most` drawn ones and what hypothesis shrinks them to."""
        import hypothesis
        from hypothesis import HealthCheck, Phase, Verbosity
        from hypothesis.errors import Flaky

        best: LawViolation | None = None
        smallest: Mapping[str, Any] = {}
        stop = self.until

        @hypothesis.seed(1000 * self.seed + shift)
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
        def look(example: dict[str, Any]) -> None:
            nonlocal best, smallest, stop
            if time.perf_counter() > stop:
                raise _LongEnough
            found = self._try(check, example)
            if found is None:
                return
            if best is None:
                stop = time.perf_counter() + SHRINKING
            if best is None or _size(found) < _size(best):
                best, smallest = found, example
            raise found

        with suppress(LawViolation, Flaky, _LongEnough):
            look()
        return best, smallest


def check_names(laws: Collection[str] | None, known: Collection[str], budget: str) -> None:
    """Refuse names of laws and budgets that are not there."""
    if budget not in BUDGETS:
        raise ValueError(
            f"expected budget to be one of {', '.join(BUDGETS)}, got {budget!r}{closest(budget, BUDGETS)}"
        )
    if isinstance(laws, str):
        raise TypeError(f"expected laws to be several names, got the string {laws!r}.")
    for law in laws or ():
        if law not in known:
            raise ValueError(f"no law is called {law!r}{closest(law, known)} Known: {', '.join(known)}.")


def need_hypothesis() -> None:
    try:
        import hypothesis  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError('testing needs hypothesis: pip install "seqzoo[testing]"') from error


def first_failure_raised(rows: Iterator[Row]) -> tuple[Row, ...]:
    """The rows, none of which is a failure: the first that is, is raised."""
    seen = []
    for row in rows:
        if row.violation is not None:
            raise row.violation from row.violation.__cause__
        seen.append(row)
    return tuple(seen)


class _LongEnough(BaseException):
    """Ends a search; not an Exception, which hypothesis would take for a failure of the law."""


def _size(violation: LawViolation) -> tuple[int, int]:
    """Tokens of an example, then how long it is to read."""
    example = violation.example
    tokens = example.get("length", 17) * example.get("batch", 2)
    if "lengths" in example:
        tokens = sum(example["lengths"]) + example.get("tail", 0)
    if "mask" in example:
        tokens = sum(map(len, example["mask"]))
    return tokens, len(repr(example))
