"""The laws about a mixer's use: that it is saved and rebuilt, that it compiles, and that it says what is wrong."""

import copy
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import seqzoo
from seqzoo import TokenMixer

from .cases import Case, Make, agree, build, draw
from .comparing import Shared, State, named_leaves, same_bits
from .law import law, require
from .routes import whole

ROUND_TRIPS = ("config", "state_dict", "deepcopy", "meta", "torch.save", "safetensors", "state")


@law
def round_trips(
    make: Make, *, way: str, dtype: torch.dtype = torch.float64, seed: int = 0, **drawn: Any
) -> None:
    """`config`, `state_dict`, `deepcopy`, the meta device, `torch.save` and safetensors give back the same bits.

    `way` is one of `ROUND_TRIPS`; "meta" is a mixer built on the meta device, `to_empty`, and loaded; "state" saves a state.
    """
    case = draw(make, dtype=dtype, seed=seed, **drawn)
    weights = case.mixer.state_dict()
    again = case
    if way == "config":
        config = json.loads(json.dumps(case.mixer.config))
        rebuilt = seqzoo.create_mixer(**config).to(dtype)
        require(
            rebuilt.config == case.mixer.config,
            f"the rebuilt mixer's config is {rebuilt.config}, it was {config}.",
        )
        again = replace(case, mixer=_loaded(rebuilt, weights))
    elif way == "state_dict":
        again = replace(case, mixer=_loaded(build(make, dtype, seed + 1), weights))
    elif way == "deepcopy":
        again = replace(case, mixer=copy.deepcopy(case.mixer))
    elif way == "meta":
        with torch.device("meta"):
            empty = make().to(dtype)
        empty.to_empty(device=case.x.device)
        for tensor in [*empty.parameters(), *empty.buffers()]:  # what to_empty named_leaves there
            tensor.data.fill_(torch.nan if tensor.is_floating_point() else 1)
        again = replace(case, mixer=_loaded(empty, weights))
    elif way == "torch.save":
        again = replace(case, mixer=_saved(case.mixer))
    elif way == "safetensors":
        from safetensors.torch import load, save

        again = replace(case, mixer=_loaded(build(make, dtype, seed + 1), load(save(weights))))
    elif way == "state":
        again = replace(case, state=_saved(case.state))
        require(
            type(again.state) is type(case.state), f"the state came back as a {type(again.state).__name__}."
        )
    else:
        raise ValueError(f"round_trips: expected way to be one of {', '.join(ROUND_TRIPS)}, got {way!r}.")
    same_bits(again.measure(whole), case.measure(whole), f"after the round trip by {way}")


@law
def compiles(
    make: Make,
    *,
    first: int,
    later: Sequence[int] = (),
    mode: str = "auto",
    given: str = "state",
    backend: str = "aot_eager",
    **drawn: Any,
) -> None:
    """`torch.compile(fullgraph=True, dynamic=True)` and `torch.export` give what eager gives, whatever the first T.

    `given` is what the calls are given: "nothing", "state", "mask" or "cu_seqlens". After `first` come the lengths `later`,
    of which the first may compile once more and the others must not. With `backend="export"`, a graph that is given nothing
    is exported instead. A float option, such as norm_eps, is a constant: traced as a symbol, everything is traced twice.
    """
    given = "nothing" if backend == "export" else given
    case = draw(make, batch=1 if given == "cu_seqlens" else 2, length=first, **drawn)
    call = _exported(case) if backend == "export" else _compiled(case.mixer, backend)

    def compiled(mixer: TokenMixer, x: Tensor, state: State, shared: Shared) -> tuple[Tensor, State]:
        return call(x, state if given == "state" else None, mode=mode, shared=shared, **_packing(given, x))

    def eager(mixer: TokenMixer, x: Tensor, state: State, shared: Shared) -> tuple[Tensor, State]:
        return mixer(x, state if given == "state" else None, mode=mode, shared=shared, **_packing(given, x))

    for i, length in enumerate((first, *later)):
        with torch._dynamo.config.patch(error_on_recompile=i > 1, specialize_float=True):
            agree(case if i == 0 else case.with_length(length), compiled, eager)


@law
def errors(make: Make, **drawn: Any) -> None:
    """What is wrong is a ValueError or a TypeError that names the argument, what was expected, what came, or the right name."""
    found = [_answer(*mistake) for mistake in _mistakes(draw(make, **drawn))]
    require(not any(found), "\n  ".join(filter(None, found)))


class Foreign(NamedTuple):
    """A state that belongs to no mixer."""

    foreign: Tensor


def _mistakes(case: Case) -> Iterator[tuple[str, Callable[[], Any], tuple[str, ...]]]:
    """What is wrong, the call, and the words that its error must have."""
    x, state = case.x, case.state
    mixer: Any = case.mixer
    B, T, D = x.shape
    other = torch.float64 if x.dtype == torch.float32 else torch.float32
    mask = torch.ones(B, T, dtype=torch.bool, device=x.device)
    cu = torch.tensor([0, 2, T], device=x.device)

    def calling(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        return lambda: mixer(*args, **kwargs)

    yield "x of rank 2", calling(x[0]), ("x", str((T, D)))
    yield "x of rank 4", calling(x[None]), ("x", str((1, B, T, D)))
    yield "x of another dim", calling(x[..., :-1]), ("x", str(D), str((B, T, D - 1)))
    yield "x of whole numbers", calling(x.long()), ("x", "int64")
    yield (
        "x of another dtype than the weights",
        calling(x.to(other)),
        ("x", str(other).removeprefix("torch.")),
    )
    yield "a mask of another length", calling(x, mask=mask[:, 1:]), ("mask", str((B, T)), str((B, T - 1)))
    yield "a mask of rank 1", calling(x, mask=mask[0]), ("mask", str((B, T)), str((T,)))
    yield (
        "a mask of floats",
        calling(x, mask=mask.to(x.dtype)),
        ("mask", "bool", str(x.dtype).removeprefix("torch.")),
    )
    yield "cu_seqlens with B=2", calling(x, cu_seqlens=cu), ("cu_seqlens", "1", "2")
    yield "cu_seqlens of floats", calling(x[:1], cu_seqlens=cu.to(x.dtype)), ("cu_seqlens", "int")
    yield "cu_seqlens of rank 2", calling(x[:1], cu_seqlens=cu[None]), ("cu_seqlens", str((1, 3)))
    yield "both a mask and cu_seqlens", calling(x[:1], mask=mask[:1], cu_seqlens=cu), ("mask", "cu_seqlens")
    yield "an unknown mode", calling(x, mode="recurent"), ("mode", "recurent", "recurrent")
    for mode in {"parallel", "chunked", "recurrent"} - set(type(mixer).modes):
        yield f"the mode {mode}, which it lacks", calling(x, mode=mode), ("mode", mode, *type(mixer).modes)
    if named_leaves(state):
        yield "a state of another batch", calling(x[:1], state), ("state", "1", "2")
        yield "a state of another mixer", calling(x, Foreign(x)), ("state", "Foreign")
        yield "a state that is a tensor", calling(x, x), ("state", "Tensor")
    yield "an unknown shared name", calling(x, shared={"no_such_name": x}), ("shared", "no_such_name")
    for name in type(mixer).reads:
        yield f"{name} of another width", calling(x, shared={name: x.new_zeros(D + 1)}), (name, str((D + 1,)))
        yield f"{name} misspelt", calling(x, shared={name + "s": x[0, 0]}), (name + "s", name)
    yield "a misspelt keyword", calling(x, cu_seqlen=cu), ("cu_seqlen", "cu_seqlens")
    yield "step with x of rank 3", lambda: mixer.step(x, state), ("x", str((B, T, D)))
    yield (
        "step with a misspelt keyword",
        lambda: mixer.step(x[:, 0], state, donated=True),
        ("donated", "donate"),
    )

    def creating(**options: Any) -> Callable[[], Any]:
        return lambda: seqzoo.create_mixer(type(mixer), D, **options)

    yield "an option that no mixer has", creating(no_such_option=1), ("no_such_option",)
    for option in mixer.config.keys() - {"name", "dim"}:
        yield f"the option {option} misspelt", creating(**{option[:-1] + "_": 1}), (option[:-1] + "_", option)


def _answer(what: str, call: Callable[[], Any], words: Sequence[str]) -> str | None:
    """What is wrong with how a mistake is answered."""
    try:
        call()
    except (ValueError, TypeError) as error:
        missing = [word for word in words if word not in str(error)]
        return f'{what}: the error does not say {" or ".join(missing)}: "{error}"' if missing else None
    except Exception as error:
        return f"{what}: expected a ValueError or a TypeError, got {type(error).__name__}: {error}"
    return f"{what}: no error was raised."


def _loaded(mixer: TokenMixer, weights: dict[str, Any]) -> TokenMixer:
    mixer.load_state_dict(weights)
    return mixer


def _saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _compiled(mixer: TokenMixer, backend: str) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(mixer, fullgraph=True, dynamic=True, backend=backend)


def _exported(case: Case) -> Callable[..., Any]:
    """The call without a state, exported with dynamic T."""
    time = torch.export.Dim("T", min=2, max=2**16)
    kinds = type(case.mixer).reads
    shared = (
        None if case.shared is None else {k: {1: time} if kinds[k] == "token" else None for k in case.shared}
    )
    with torch._dynamo.config.patch(specialize_float=True):
        program = torch.export.export(
            case.mixer, (case.x,), {"shared": case.shared}, dynamic_shapes={"x": {1: time}, "shared": shared}
        ).module()
    return lambda x, *_, shared, **__: program(x, shared=shared)


def _packing(given: str, x: Tensor) -> dict[str, Any]:
    B, T, _ = x.shape
    if given == "mask":
        return {"mask": torch.arange(T, device=x.device) >= torch.arange(B, device=x.device)[:, None]}
    if given == "cu_seqlens":
        return {"cu_seqlens": torch.tensor([0, T // 3, T // 3, T - 1], device=x.device), "max_seqlen": T}
    return {}
