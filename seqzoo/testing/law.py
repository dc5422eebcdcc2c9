"""What a law is: its name in `LAWS`, and the exception that says it is broken."""

import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NoReturn

from seqzoo import TokenMixer

LAWS: dict[str, Callable[..., None]] = {}


class LawViolation(AssertionError):
    """A mixer breaks a law.

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
        example = ", ".join(f"{name}={value!r}" for name, value in self.example.items())
        text = f"{self.law}: {_on_a_screen(self.what)}\n  law: {self.rule}\n  example: {self.law}(make, {example})"
        if self.measured is not None and self.allowed is not None:
            text += f"\n  error: {self.measured:.3g}, allowed: {self.allowed:.3g}"
        if self.script:
            text += "\n  again:\n" + textwrap.indent(self.script, "    ")
        return text


def _on_a_screen(text: str, lines: int = 12, width: int = 400) -> str:
    """The text, without what would not fit: a compiler's error may have a hundred lines."""
    kept = [
        line if len(line) <= width else line[:width] + " ..." for line in text.splitlines() if line.strip()
    ]
    more = [f"  ... and {len(kept) - lines} more lines"] if len(kept) > lines else []
    return "\n".join(kept[:lines] + more)


def violated(what: str, *, measured: float | None = None, allowed: float | None = None) -> NoReturn:
    """Say that the law being tested is broken."""
    raise LawViolation(what, measured=measured, allowed=allowed)


def require(holds: bool, what: str) -> None:
    """Say that the law being tested is broken, unless it `holds`."""
    if not holds:
        violated(what)


def law(check: Callable[..., None]) -> Callable[..., None]:
    """Enter a law in `LAWS`. Its first docstring line is the rule; a crash on a legal call breaks it too.

    Keywords beyond its own, `**drawn`, are what its case is drawn from.
    """
    rule = (inspect.getdoc(check) or "").partition("\n\n")[0].replace("\n", " ")
    signature = inspect.signature(check)

    @functools.wraps(check)
    def tested(make: Callable[[], TokenMixer], **example: Any) -> None:
        given = signature.bind(make, **example)
        given.apply_defaults()
        try:
            check(make, **example)
        except Exception as error:
            found = (
                error if isinstance(error, LawViolation) else LawViolation(f"{type(error).__name__}: {error}")
            )
            found.law, found.rule = check.__name__, rule
            found.example = {k: v for k, v in given.arguments.items() if k not in ("make", "drawn")}
            found.example |= given.arguments.get("drawn", {})
            if found is error:
                raise
            raise found from error

    LAWS[check.__name__] = tested
    return tested
