"""The laws every mixer obeys, and the kit that tests any mixer on them.

    check_mixer("package.module:Class")     raises the first LawViolation, or returns a Report
    class TestMine(MixerLaws): mixer = Mine     one test a law
    LAWS["splitting"](make, cuts=(3,))      one law on one example
    check_op("linear_scan", my_backend)     the same for a kernel, on OP_LAWS

The strategies and the kit need hypothesis when they are used: pip install "seqzoo[testing]".
"""

import importlib
from typing import Any

from . import laws, laws_of_use, op_laws
from .kit import check_mixer
from .law import LAWS, OP_LAWS, LawViolation
from .layouts import poisoned_memory
from .op_kit import check_op
from .report import Report
from .subject import find_mixer
from .suite import MixerLaws

__all__ = [
    "LAWS",
    "OP_LAWS",
    "LawViolation",
    "MixerLaws",
    "Report",
    "check_mixer",
    "check_op",
    "find_mixer",
    "laws",
    "laws_of_use",
    "op_laws",
    "poisoned_memory",
    "strategies",
]


def __getattr__(name: str) -> Any:
    if name == "strategies":  # imported when it is used, since it needs hypothesis
        return importlib.import_module(".strategies", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
