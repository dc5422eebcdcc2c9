"""What became of each law, as a table."""

from dataclasses import dataclass

from .law import LawViolation


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
    """What became of each law; as text, a table.

    Args:
        subject: the name of what was tested.
        rows: one for each law: `law`, `outcome` ("pass", "fail" or "skip"), `note`, `seconds`, `examples`, `violation`.
    """

    subject: str
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
        return "\n".join([self.subject, *lines])
