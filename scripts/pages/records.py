"""The recorded runs in docs/benchmarks, and what a page of the zoo takes from them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
Row = Mapping[str, Any]


class Record(NamedTuple):
    """One file: its name without the ending, and what it holds."""

    stem: str
    data: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """The first word of the name: "ops" of ops-cpu-2026-12-01."""
        return self.stem.partition("-")[0]

    @property
    def date(self) -> str:
        return str(self.data.get("date") or self.versions.get("date", "no date"))

    @property
    def versions(self) -> Mapping[str, Any]:
        """Package -> version, wherever the script put it."""
        return self.data.get("versions") or self.data.get("environment") or {}

    @property
    def machine(self) -> str:
        """In words: the device, and its threads where they were counted."""
        told = self.data.get("machine") or self.data.get("device") or self.versions.get("machine") or ""
        if isinstance(told, Mapping):
            parts = [str(told.get("device", "")), str(told.get("platform", ""))]
            told = ", ".join(dict.fromkeys(p for p in parts if p)) + (
                f", {told['threads']} threads"
                if "cpu" in str(told.get("device", "")) and "threads" in told
                else ""
            )
        if "-h200-" in self.stem and "H200" not in told:
            told = "NVIDIA H200"
        if told in ("", "cpu", "x86_64") and "-cpu-" in self.stem:
            told = "x86_64 CPU"
        threads = self.data.get("threads")
        return f"{told}, {threads} thread{'' if threads == 1 else 's'}" if threads else told or "not recorded"

    def rows(self, *keys: str) -> list[Row]:
        """Rows that have all of these keys, of any list in the file."""
        lists = [value for value in self.data.values() if isinstance(value, list)]
        return [
            row for rows in lists for row in rows if isinstance(row, dict) and all(k in row for k in keys)
        ]


def read(folder: Path = FOLDER) -> list[Record]:
    """All records, the newest first."""
    found = [Record(path.stem, json.loads(path.read_text("utf-8"))) for path in folder.glob("*.json")]
    return sorted(found, key=lambda record: (record.date, record.stem), reverse=True)


def of_mixer(records: Sequence[Record], name: str, *keys: str) -> Iterator[tuple[Record, list[Row]]]:
    """Records with rows of the mixer `name` that have these keys, and those rows; the newest record first."""
    for record in records:
        rows = [row for row in record.rows("mixer", *keys) if row["mixer"] == name]
        if rows:
            yield record, rows
