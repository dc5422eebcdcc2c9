"""What a law is: its name in `LAWS` (of mixers) or `OP_LAWS` (of kernels), and the exception that says it is broken."""

import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

LAWS: dict[str, Callable[..., None]] = {}  # of a mixer: LAWS[name](make, **example)
OP_LAWS: dict[str, Callable[..., None]] = {}  # of a kernel: OP_LAWS[name](op, backend, **example)

SCREEN = (24, 120)  # lines and columns that a violation fits in
LONG_RUN = 16


class LawViolation(AssertionError):
    """A mixer or a kernel breaks a law.

    law       the law's name; the law itself fills it in, and the two below it
    rule      its definition, in a sentence
    example   the keyword arguments that show it: ``LAWS[law](make, **example)``
    measured  the error, where the law is about one
    allowed   the error that the law allows
    script    two lines that show it again, where the kit knows how the mixer is built
    """

    def __init__(self, what: str, *, measured: float | None = None, allowed: float | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.measured = measured
        self.allowed = allowed
        self.law = ""
        self.rule = ""
        self.example: dict[str, Any] = {}
        self.script = ""

    def __str__(self) -> str:
        text = f"\n  law: {self.rule}\n  example: {arguments(self.example)}"
        if self.measured is not None and self.allowed is not None:
            text += f"\n  error: {self.measured:.3g}, allowed: {self.allowed:.3g}"
        if self.script:
            text += "\n  again:\n" + textwrap.indent(self.script, "    ")
        lines, _ = SCREEN
        return f"{self.law}: {cut_to(self.what, max(3, lines - rows_of(text) - 2))}{text}"


def rows_of(text: str) -> int:
    """Rows of a screen that a text takes."""
    _, columns = SCREEN
    return sum(max(1, -(-len(line) // columns)) for line in text.splitlines())


def cut_to(text: str, rows: int) -> str:
    """The text without what would not fit: a compiler's error may have a hundred lines."""
    _, columns = SCREEN
    kept = [line[: 3 * columns] for line in text.splitlines() if line.strip()]
    left = list(itertools.accumulate(map(rows_of, kept)))
    fits = max(1, sum(total <= rows for total in left))
    more = [f"  ... and {len(kept) - fits} more lines"] if len(kept) > fits else []
    return "\n".join(kept[:fits] + more)


def arguments(example: Mapping[str, Any]) -> str:
    """An example as Python's keyword arguments."""
    return ", ".join(f"{name}={code(value)}" for name, value in example.items())


def code(value: Any) -> str:
    """Python for a value; long runs in a string, as in a mask of a thousand tokens, are written as products."""
    if isinstance(value, str) and len(value) >= LONG_RUN:
        runs = [(char, len(list(run))) for char, run in itertools.groupby(value)]
        if len(runs) <= len(value) // 4:
            return " + ".join(f"{char!r} * {count}" for char, count in runs)
    if type(value) is tuple:
        return "(" + ", ".join(map(code, value)) + ("," if len(value) == 1 else "") + ")"
    return repr(value)


def violated(what: str, *, measured: float | None = None, allowed: float | None = None) -> NoReturn:
    """Say that the law being tested is broken."""
    raise LawViolation(what, measured=measured, allowed=allowed)


def require(holds: bool, what: str) -> None:
    """Say that the law being tested is broken, unless it `holds`."""
    if not holds:
        violated(what)


def law(check: Callable[..., None]) -> Callable[..., None]:
    """Enter a law in `LAWS`. Its first docstring line is the rule; a crash on a legal call breaks it too.

    Its keywords are the example. Those beyond its own, `**drawn`, are what its case is drawn from.
    """
    return _entered(check, LAWS)


def op_law(check: Callable[..., None]) -> Callable[..., None]:
    """Enter a law in `OP_LAWS`, as `law` does."""
    return _entered(check, OP_LAWS)


def _entered(check: Callable[..., None], laws: dict[str, Callable[..., None]]) -> Callable[..., None]:
    rule = (inspect.getdoc(check) or "").partition("\n\n")[0].replace("\n", " ")
    signature = inspect.signature(check)
    own = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]

    @functools.wraps(check)
    def tested(*subject: Any, **example: Any) -> None:
        given = signature.bind(*subject, **example)
        given.apply_defaults()
        try:
            check(*subject, **example)
        except Untestable:
            raise
        except Exception as error:
            found = (
                error if isinstance(error, LawViolation) else LawViolation(f"{type(error).__name__}: {error}")
            )
            found.law, found.rule = check.__name__, rule
            found.example = {name: given.arguments[name] for name in own}
            found.example |= given.arguments.get("drawn", {})
            if found is error:
                raise
            raise found from error

    laws[check.__name__] = tested
    return tested


class Untestable(Exception):
    """An example that can't be tried on this subject, and why: a kernel that does not serve such a call."""
