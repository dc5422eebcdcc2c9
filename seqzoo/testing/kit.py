"""Test any mixer on the laws: `check_mixer("package.module:Class")`. Needs hypothesis."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .law import LAWS
from .report import Report, Row
from .search import BUDGETS, Search, check_names, first_failure_raised, need_hypothesis
from .subject import Mixer, Subject, importable, subject

if TYPE_CHECKING:
    from .examples import Examples


def check_mixer(
    mixer: Mixer,
    *,
    options: Mapping[str, Any] | None = None,
    laws: Collection[str] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    devices: Sequence[str] | None = None,
    budget: str = "quick",
    seed: int = 0,
    seconds: float | None = None,
) -> Report:
    """Test a mixer on the laws; the first that it breaks is raised.

    Args:
        mixer: a registered name, a TokenMixer class, "package.module:Class", "path/to/file.py:Class", or a function without
            arguments that builds one.
        options: of the mixer, where it is no function.
        laws: the names in `LAWS` to test; by default all.
        dtypes: instead of those that each law is about.
        devices: by default the CPU.
        budget: "quick", or "thorough", which draws twenty times as many examples and goes to a thousand tokens.
        seed: of weights, tokens and examples.
        seconds: after which nothing more is drawn; what no run leaves out is tried all the same.

    Raises:
        LawViolation: which law is broken, the smallest example found, by how much, and two lines that show it again.
        ValueError, TypeError, ImportError: there is no such mixer, law or budget; hypothesis is missing.
    """
    tested = subject(mixer, options)
    rows = check_laws(
        tested, laws=laws, dtypes=dtypes, devices=devices, budget=budget, seed=seed, seconds=seconds
    )
    return Report(tested.name, first_failure_raised(rows))


def check_laws(
    tested: Subject,
    *,
    laws: Collection[str] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    devices: Sequence[str] | None = None,
    budget: str = "quick",
    seed: int = 0,
    seconds: float | None = None,
) -> Iterator[Row]:
    """`check_mixer` without stopping: the row of each law as soon as it is known."""
    check_names(laws, LAWS, budget)
    need_hypothesis()
    from .examples import EXAMPLES

    asked = [law for law in LAWS if laws is None or law in laws]
    places = [tested.on(device) for device in devices or ["cpu"]]
    end = time.perf_counter() + (seconds or float("inf"))

    def share(done: int) -> float:
        """Until when a law may draw: what one law leaves is for those after it."""
        now = time.perf_counter()
        return now + (end - now) / (len(asked) - done)

    return (
        _row(places, law, EXAMPLES[law], dtypes, budget, seed, share(done)) for done, law in enumerate(asked)
    )


def _row(
    places: Sequence[Subject],
    law: str,
    examples: "Examples",
    dtypes: Sequence[torch.dtype] | None,
    budget: str,
    seed: int,
    until: float,
) -> Row:
    search = Search(law, seed, BUDGETS[budget], until)
    for place in places:
        always, note = _possible(law, examples.always, place)
        search.notes.add(note)
        if not always:
            continue
        drawn = None if examples.drawn is None else _with_options(examples.drawn, place)
        long = examples.long if budget == "thorough" else ()
        for shift, dtype in enumerate(dtypes or examples.dtypes):
            for mode in _modes(examples, place):  # each on the same examples
                check = partial(place.test, law, {"dtype": dtype, **mode})
                # a thousand steps' gradients are added up by autograd, one by one: that rounding is not the mixer's
                some = always if mode.get("mode") == "step" and dtype != torch.float64 else [*always, *long]
                found = search.run(check, some, drawn, shift)
                if found is not None:
                    return search.row(found)
    return search.row(None)


def _with_options(drawn: Any, place: Subject) -> Any:
    """The strategy, the mixer's options drawn too."""
    if place.cls is None:
        return drawn
    from . import strategies

    others = strategies.options(place.cls, place.options)
    return strategies.joined(drawn, others.map(lambda options: {"options": options}))


def _modes(examples: "Examples", place: Subject) -> list[dict[str, str]]:
    """The modes to try, as arguments of the law."""
    if not examples.modes:
        return [{}]
    modes = type(place.make()).modes
    return [{"mode": mode} for mode in (*modes, *["step"] * examples.step)]


def _possible(law: str, examples: Sequence[dict[str, Any]], place: Subject) -> tuple[list[dict], str]:
    """The examples that can be tried here, and why the others can't."""
    from torch._dynamo.eval_frame import is_dynamo_supported

    mixer = place.make()
    device = next((p.device.type for p in mixer.parameters()), "cpu")
    impossible: dict[
        str, Collection[str] | None
    ] = {}  # reason -> ways of round_trips, None for every example
    if law == "modes_agree" and "recurrent" not in type(mixer).modes:
        impossible["no recurrent mode to compare with"] = None
    if law == "compiles" and not is_dynamo_supported():
        impossible["torch.compile does not run here"] = None
    if law == "round_trips":
        if device != "cpu":
            impossible[f"tested on the CPU, not on {device}"] = None
        if not importable(type(mixer)):
            impossible["config, torch.save: the class can't be imported"] = ("config", "torch.save")
        if not importable(type(mixer.init_state(0))):
            impossible["state: its class can't be imported"] = ("state",)
        try:
            import safetensors  # noqa: F401
        except ModuleNotFoundError:
            impossible["safetensors is not installed"] = ("safetensors",)
    left = [e for e in examples if not any(ways is None or e["way"] in ways for ways in impossible.values())]
    return left, "; ".join(impossible)
