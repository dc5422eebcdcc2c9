"""The closest right name, for errors that teach."""

import difflib
from collections.abc import Iterable


def closest(name: str, known: Iterable[str]) -> str:
    """How a sentence ends that names something wrong: with "did you mean ...?", or a full stop if nothing known is near."""
    matches = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else "."
