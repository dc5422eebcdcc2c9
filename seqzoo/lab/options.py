"""Options of a mixer or a task on the command line: name=value."""

from __future__ import annotations

import ast
from typing import Any

from seqzoo.lab.errors import LabError


def parse_option(text: str) -> tuple[str, Any]:
    """Name and value of "name=value"; a value that is no Python literal is text."""
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise LabError(f"option: expected name=value, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
