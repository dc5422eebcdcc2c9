"""The pytest plugin of seqzoo: `pytest --seqzoo-mixer=package.module:Class` tests that mixer, one item a law.

It imports nothing of seqzoo until the option is used, so that it costs other projects no time.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("seqzoo")
    group.addoption(
        "--seqzoo-mixer",
        action="append",
        default=[],
        metavar="MIXER",
        help="Also test this mixer on the laws of seqzoo: a registered name, package.module:Class or file.py:Class. "
        "May be given several times.",
    )
    group.addoption("--seqzoo-budget", default="quick", help="quick or thorough.")
    group.addoption("--seqzoo-seed", type=int, default=0, help="Seed of weights, tokens and examples.")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    mixers = config.getoption("seqzoo_mixer")
    if not mixers:
        return
    sys.path.insert(0, str(config.invocation_params.dir))  # as `python -m pytest` does
    from seqzoo.testing import LAWS, find_mixer

    for mixer in mixers:
        try:
            find_mixer(mixer)
        except (ValueError, TypeError, ImportError) as error:
            raise pytest.UsageError(f"--seqzoo-mixer: {error}") from error
        items.extend(
            LawItem.from_parent(session, name=law, nodeid=f"{mixer}::{law}", mixer=mixer, law=law)
            for law in LAWS
        )


class LawItem(pytest.Item):
    """A law, tested on a mixer."""

    def __init__(self, *, mixer: str, law: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mixer = mixer
        self.law = law

    def runtest(self) -> None:
        from seqzoo.testing import check_mixer
        from seqzoo.testing.suite import skip_if_skipped

        budget, seed = self.config.getoption("seqzoo_budget"), self.config.getoption("seqzoo_seed")
        (row,) = check_mixer(self.mixer, laws=[self.law], budget=budget, seed=seed).rows
        skip_if_skipped(row.outcome, row.note)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from seqzoo.testing import LawViolation

        if isinstance(excinfo.value, LawViolation):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, None, str]:
        return self.mixer, None, f"{self.mixer}: {self.law}"
