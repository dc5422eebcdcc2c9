"""The ops that have a bench of their own. The file of an op has a function ``cases() -> list[core.Case]``."""

import importlib

from .core import Case

OPS = ("linear_scan", "gated_linear_attention", "attention")


def cases(op: str) -> list[Case]:
    return importlib.import_module(f"{__package__}.{op}").cases()
