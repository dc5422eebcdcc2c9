"""What each law of a kernel is tried on: every variant of its op in every run, and strategies that draw more."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from . import strategies
from .examples import DTYPES, HALVES, SCATTERED, Example, Examples
from .op_cases import GATES, VARIANTS

WIDTHS = (1, 2, 3, 5, 12, 24)  # most are no power of two
CHUNK_SIZES = (None, 1, 2, 7, 16, 32, 64)
ALL_DTYPES = (*DTYPES, *HALVES)


def op_examples(op: str) -> Mapping[str, Examples]:
    """The examples of each law, for one op."""
    gates = list(GATES) if op != "causal_conv1d" else ["mild"]
    return {
        "precision": _every(
            op,
            [{"length": 67, "gate": "mild"}, {"length": 19, "gate": "tiny", "size": 5, **SCATTERED}],
            drawn=_drawn(op, batch=strategies.batches(), length=strategies.lengths()),
            dtypes=ALL_DTYPES,
        ),
        "extremes": _every(
            op,
            [
                *({"length": 40, "gate": gate, "poisoned": True} for gate in gates),
                {"length": 35, "gradients": "expanded", "layout": "strided"},
                {"length": 0},
                {"length": 1, "start": False},
                {"batch": 0, "length": 5},
            ],
            drawn=_drawn(op, batch=strategies.batches(0), length=strategies.lengths()),
            dtypes=ALL_DTYPES,
        ),
        "splitting": _every(
            op,
            [{"length": 70, "cuts": (1, 3, 68)}, {"length": 17, "cuts": (0, 16, 17), "start": False}],
            drawn=strategies.joined(_drawn(op), strategies.lengths_and_cuts().map(_named)),
        ),
        "packing": _every(
            op,
            [
                {"lengths": (0, 13, 0, 1, 17, 0), "tail": 4, **SCATTERED},
                {"lengths": (0, 0), "tail": 3, "bounded": True},
                {"lengths": (10, 5, 0, 65), "start": False, "bounded": True},
                {"lengths": ()},
            ],
            drawn=_drawn(
                op, lengths=strategies.packs(), tail=strategies.tails(), bounded=strategies.booleans()
            ),
            dtypes=ALL_DTYPES,
        ),
        "state_value": _every(op, [{"length": 0}, {"length": 1}, {"length": 20}, {"lengths": (5, 0, 9)}]),
    }


def _every(
    op: str,
    examples: Sequence[Example],
    drawn: SearchStrategy[Example] | None = None,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> Examples:
    """The examples, with each variant at least once: the first of them with every variant, the others in turn."""
    variants = VARIANTS[op]
    all_of_first = [{"variant": variant, **examples[0]} for variant in variants]
    rest = [{"variant": variants[i % len(variants)], **example} for i, example in enumerate(examples[1:])]
    return Examples(always=(*all_of_first, *rest), drawn=drawn, dtypes=dtypes)


def _drawn(op: str, **own: SearchStrategy[Any]) -> SearchStrategy[Example]:
    """What `draw_op` takes, the chunk size and how things lie in memory."""
    case = st.fixed_dictionaries(
        {
            "variant": st.sampled_from(VARIANTS[op]),
            "size": st.sampled_from(WIDTHS),
            "seed": strategies.seeds(),
            "gate": strategies.gates(),
            "start": st.booleans(),
            "chunk_size": st.sampled_from(CHUNK_SIZES),
            **own,
        }
    )
    return strategies.joined(case, strategies.memory())


def _named(pair: tuple[int, tuple[int, ...]]) -> Example:
    length, cuts = pair
    return {"length": length, "cuts": cuts}
