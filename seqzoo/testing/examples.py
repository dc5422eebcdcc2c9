"""What each law is tried on: examples that no run leaves out, and the strategies that draw more. Needs hypothesis.

An example is the keyword arguments of a law but `mode` and `dtype`, which the kit and the tests go through one by one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from . import strategies
from .laws_of_use import ROUND_TRIPS
from .subject import CHUNK

Example = dict[str, Any]

DTYPES = (torch.float64, torch.float32)
HALVES = (torch.bfloat16, torch.float16)
SCATTERED: Example = {"layout": "strided", "gradients": "strided", "poisoned": True}


@dataclass(frozen=True)
class Examples:
    """The examples of one law.

    always  tried in every run
    drawn   more, drawn at random
    long    a thousand tokens
    modes   whether each mode is tried by itself, and whether a `step` a token is one more
    dtypes  the dtypes that the law is about
    """

    always: tuple[Example, ...]
    drawn: SearchStrategy[Example] | None = None
    long: tuple[Example, ...] = ()
    modes: bool = True
    step: bool = False
    dtypes: tuple[torch.dtype, ...] = DTYPES


def _drawn(**own: SearchStrategy[Any]) -> SearchStrategy[Example]:
    """A law's own arguments, what its case is drawn from, and how it lies in memory."""
    return strategies.joined(st.fixed_dictionaries(own), strategies.drawn(), strategies.memory())


def _with_length(cut: str, pairs: SearchStrategy[tuple[int, Any]]) -> SearchStrategy[Example]:
    """A length and where to cut it, what the case is drawn from, and how it lies in memory."""
    own = pairs.map(lambda pair: {"length": pair[0], cut: pair[1]})
    return strategies.joined(own, strategies.drawn(), strategies.memory())


EXAMPLES: Mapping[str, Examples] = MappingProxyType(
    {
        "modes_agree": Examples(
            always=(
                {"batch": 2, "length": CHUNK - 1, "shared": True},
                {"batch": 2, "length": 2 * CHUNK + 1, "history": 0},
                {"batch": 1, "length": 1},
                {"batch": 1, "length": CHUNK + 1, **SCATTERED},
                {"batch": 2, "length": CHUNK - 1, "gradients": "expanded"},
            ),
            drawn=_drawn(batch=strategies.batches(), length=strategies.lengths()),
            long=({"length": 1000},),
            step=True,
        ),
        "splitting": Examples(
            always=(
                {"length": 70, "cuts": (1, 3, 68), "history": 0},
                {"length": CHUNK + 1, "cuts": (CHUNK,), "shared": True, **SCATTERED},
                {"length": 6, "cuts": (0, 6)},
            ),
            drawn=_with_length("cuts", strategies.lengths_and_cuts()),
            long=({"length": 1000, "cuts": (37, 38, 500)},),
        ),
        "causality": Examples(
            always=(
                {"length": 2 * CHUNK + 1, "cut": CHUNK - 1},
                {"length": 2 * CHUNK + 1, "cut": CHUNK - 1, "history": 0},
            ),
            drawn=_with_length("cut", strategies.lengths_and_cut()),
        ),
        "packing": Examples(
            always=(
                {"lengths": (10, 5, 22), "tail": 0, "bounded": False, "history": 0},
                {
                    "lengths": (0, CHUNK, 0, 1, CHUNK + 1, 0),
                    "tail": 2,
                    "bounded": True,
                    "shared": True,
                    **SCATTERED,
                },
                {"lengths": (0, 0), "tail": 3, "bounded": True},
                {"lengths": (), "tail": 0, "bounded": True, "gradients": "strided"},
            ),
            drawn=_drawn(lengths=strategies.packs(), tail=strategies.tails(), bounded=strategies.booleans()),
            long=({"lengths": (0, 13, 487, 500)},),
        ),
        "padding": Examples(
            always=(
                {"mask": ("111111110000", "111100111000"), "history": 0},
                {"mask": ("0" * 7 + "1" * 17, "1" * 24, "0" * 24), "shared": True, **SCATTERED},
            ),
            drawn=_drawn(mask=strategies.masks()),
            long=(
                {
                    "mask": (
                        "0" * 500 + "1" * 500,
                        "1" * 500 + "0" * 500,
                        "1" * 250 + "0" * 500 + "1" * 250,
                        "0" * 1000,
                    )
                },
            ),
        ),
        "rows": Examples(
            always=(
                {"index": (2, 0, 0), "batch": 3, "length": CHUNK + 1},
                {"index": (), "batch": 3, "length": 0, "gradients": "strided"},
            ),
            drawn=_drawn(index=strategies.indices(), batch=st.just(3), length=strategies.lengths()),
            long=({"index": (2, 0, 1, 0), "batch": 3, "length": 1000},),
        ),
        "state_value": Examples(
            always=({"length": 1}, {"length": CHUNK + 1, "shared": True}),
            drawn=strategies.joined(
                st.fixed_dictionaries({"length": strategies.lengths(40)}), strategies.drawn()
            ),
        ),
        "precision": Examples(
            always=({"length": 67, "history": 0}, {"length": 67, "history": 5}),
            dtypes=(*DTYPES, *HALVES),
        ),
        "extremes": Examples(
            always=tuple(
                {"batch": batch, "length": length, "scale": scale, "history": history}
                for batch, length, scale in [(2, 33, 30.0), (2, 0, 1.0), (0, 5, 1.0), (0, 0, 1.0)]
                for history in (0, 5)
            ),
        ),
        "round_trips": Examples(
            always=tuple({"way": way} for way in ROUND_TRIPS),
            modes=False,
            dtypes=(torch.float32, torch.bfloat16),
        ),
        "compiles": Examples(
            always=(
                {"first": 3, "later": (50, 33)},
                {"first": 33, "later": (4, 50), "given": "cu_seqlens", "shared": True},
                {"first": 50, "later": (33, 3), "given": "mask"},
                {"first": 1, "mode": "recurrent"},
                {"first": 33, "later": (3, 50), "backend": "export"},
            ),
            modes=False,
            dtypes=(torch.float32,),
        ),
        "errors": Examples(always=({},), modes=False),
    }
)
