"""Hypothesis strategies for the examples of a law: shapes, cuts, packs, masks, seeds."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

CHUNK = 16  # lengths just below, at and above a multiple of it are the ones that break


def seeds() -> SearchStrategy[int]:
    """Seeds of weights and tokens."""
    return st.integers(0, 2**16 - 1)


def drawn() -> SearchStrategy[dict[str, Any]]:
    """What weights, tokens and state are drawn from; with or without what other layers share; from the start or later."""
    return st.fixed_dictionaries(
        {"seed": seeds(), "shared": st.booleans(), "history": st.sampled_from([0, 1, 5])}
    )


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
