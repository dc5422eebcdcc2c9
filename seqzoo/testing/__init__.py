"""The laws every mixer obeys, as functions that test one, and the strategies that draw their examples.

`LAWS` maps the name of a law to ``law(make, **example)``: `make` builds a mixer, and the law raises `LawViolation` if the mixer
breaks it on that example. The strategies, in `seqzoo.testing.strategies`, need hypothesis.
"""

from . import laws, laws_of_use
from .law import LAWS, LawViolation

__all__ = ["LAWS", "LawViolation", "laws", "laws_of_use"]
