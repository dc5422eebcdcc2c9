"""Hypothesis strategies for what the laws are tried on: mixers, options, shapes, cuts, packs, masks, gates, memory."""

import inspect
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

import seqzoo
from seqzoo import TokenMixer

from .layouts import GRADIENTS, LAYOUTS
from .op_cases import GATES
from .subject import CHUNK, DIM, find_mixer

# lengths just below, at and above a multiple of CHUNK are the ones that break
COUNTS = (1, 2, 3, 4, 8, 17)  # for options that count something


def seeds() -> SearchStrategy[int]:
    """Seeds of weights and tokens."""
    return st.integers(0, 2**16 - 1)


def drawn() -> SearchStrategy[dict[str, Any]]:
    """What weights, tokens and state are drawn from; with or without what other layers share; from the start or later."""
    return st.fixed_dictionaries(
        {"seed": seeds(), "shared": st.booleans(), "history": st.sampled_from([0, 1, 5])}
    )


def memory() -> SearchStrategy[dict[str, Any]]:
    """How inputs and gradients lie in memory, and whether fresh memory is full of NaN; see `layouts`."""
    return st.fixed_dictionaries(
        {
            "layout": st.sampled_from(LAYOUTS),
            "gradients": st.sampled_from(GRADIENTS),
            "poisoned": st.booleans(),
        }
    )


def joined(*parts: SearchStrategy[dict[str, Any]]) -> SearchStrategy[dict[str, Any]]:
    """The keyword arguments of several strategies together."""
    return st.tuples(*parts).map(lambda drawn: {name: v for part in drawn for name, v in part.items()})


def mixers(pattern: str = "*") -> SearchStrategy[str]:
    """Names of registered mixers."""
    return st.sampled_from(seqzoo.list_mixers(pattern))


@st.composite
def options(
    draw: Any, mixer: str | type[TokenMixer], fixed: Mapping[str, Any] | None = None, most: int = 2
) -> dict[str, Any]:
    """Options of a mixer beside the `fixed` ones, up to `most` away from their defaults; the signature tells their kinds.

    Counts, measures and switches vary; a word has only its default, and so has dropout, which is random on purpose. What the
    mixer refuses with a ValueError or a TypeError is not drawn.
    """
    cls, fixed = find_mixer(mixer) if isinstance(mixer, str) else mixer, fixed or {}
    choices = {name: _values(p) for name, p in list(inspect.signature(cls).parameters.items())[1:]}
    names = sorted(name for name, values in choices.items() if values and name not in fixed)
    if not names:
        return {}
    some = st.lists(st.sampled_from(names), max_size=most, unique=True)
    drawn = some.flatmap(lambda some: st.fixed_dictionaries({n: st.sampled_from(choices[n]) for n in some}))
    return draw(drawn.filter(lambda given: _builds(cls, {**fixed, **given})))


def _values(option: inspect.Parameter) -> list[Any]:
    """Other values than the default, of the same kind."""
    kind, default = str(option.annotation), option.default
    if "dropout" in option.name:
        return []
    if isinstance(default, bool):
        return [not default]
    if isinstance(default, float):
        # a share stays between 0 and 1
        return [default / 2, default**0.5 if default <= 1 else 2 * default] if default > 0 else [0.25]
    if isinstance(default, int) or (default is None and "int" in kind):
        return [count for count in COUNTS if count != default]
    return []


def _builds(cls: type[TokenMixer], given: Mapping[str, Any]) -> bool:
    try:
        seqzoo.create_mixer(cls, DIM, **given)
    except (ValueError, TypeError):
        return False
    return True


def gates() -> SearchStrategy[str]:
    """Kinds of log-decays, for an op: mild, saturated, -inf, -1e9, -1e-6, and all of these in turn."""
    return st.sampled_from(list(GATES))


def batches(smallest: int = 1) -> SearchStrategy[int]:
    """Batch sizes."""
    return st.integers(smallest, 3)


def lengths(longest: int = 70, chunk: int = CHUNK) -> SearchStrategy[int]:
    """Numbers of tokens: any, often the edges of a chunk."""
    edges = sorted(
        {n for k in range(longest // chunk + 1) for n in (k * chunk - 1, k * chunk, k * chunk + 1)}
    )
    # shrinking prefers what stands on the left
    return st.integers(0, longest) | st.sampled_from([n for n in edges if 0 <= n <= longest])


@st.composite
def lengths_and_cuts(draw: Any, longest: int = 70, most: int = 3) -> tuple[int, tuple[int, ...]]:
    """A number of tokens and up to `most` places to cut, ends and repeats included."""
    length = draw(lengths(longest))
    return length, tuple(sorted(draw(st.lists(st.integers(0, length), min_size=1, max_size=most))))


@st.composite
def lengths_and_cut(draw: Any, longest: int = 70) -> tuple[int, int]:
    """A number of tokens and one place to cut."""
    length, (cut,) = draw(lengths_and_cuts(longest, most=1))
    return length, cut


def packs(longest: int = 40, most: int = 4) -> SearchStrategy[tuple[int, ...]]:
    """Lengths of the sequences of a pack; empty ones, and empty packs, are among them."""
    return st.lists(st.just(0) | lengths(longest), max_size=most).map(tuple)


def tails() -> SearchStrategy[int]:
    """Numbers of tokens behind the last sequence of a pack."""
    return st.integers(0, 3)


def booleans() -> SearchStrategy[bool]:
    """Whether an optional argument is given."""
    return st.booleans()


@st.composite
def masks(draw: Any, longest: int = 40) -> tuple[str, ...]:
    """Masks, a string a row ("1" is a token): no pad, pads on the left, on the right, inside, anywhere, everywhere."""
    length = draw(lengths(longest))
    return tuple(draw(mask_rows(length)) for _ in range(draw(batches())))


@st.composite
def mask_rows(draw: Any, length: int) -> str:
    """One row of a mask."""
    a, b = sorted(draw(st.tuples(st.integers(0, length), st.integers(0, length))))
    anywhere = st.text("01", min_size=length, max_size=length)
    inside = "1" * a + "0" * (b - a) + "1" * (length - b)
    choices = st.sampled_from(
        ["1" * length, "0" * a + "1" * (length - a), "1" * a + "0" * (length - a), inside, "0" * length]
    )
    return draw(choices | anywhere)


@st.composite
def indices(draw: Any, batch: int = 3) -> tuple[int, ...]:
    """Rows to pick from a batch: any order, repeats, some left out, none."""
    return tuple(draw(st.lists(st.integers(0, batch - 1), max_size=batch + 1)))
