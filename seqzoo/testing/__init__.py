"""The laws every mixer obeys, and the kit that tests any mixer on them.

    check_mixer("package.module:Class")     raises the first LawViolation, or returns a Report
    class TestMine(MixerLaws): mixer = Mine     one test a law
    LAWS["splitting"](make, cuts=(3,))      one law on one example

The strategies and the kit need hypothesis when they are used: pip install "seqzoo[testing]".
"""

import importlib
from typing import Any

from . import laws, laws_of_use
from .kit import Report, check_mixer
from .law import LAWS, LawViolation
from .subject import find_mixer
from .suite import MixerLaws

__all__ = [
    "LAWS",
    "LawViolation",
    "MixerLaws",
    "Report",
    "check_mixer",
    "find_mixer",
    "laws",
    "laws_of_use",
    "strategies",
]


def __getattr__(name: str) -> Any:
    if name == "strategies":  # imported when it is used, since it needs hypothesis
        return importlib.import_module(".strategies", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
