"""Mixers by name: register, list, describe, create."""

import dataclasses
import fnmatch
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from .errors import closest
from .mixer import TokenMixer

ENTRY_POINTS = "seqzoo.mixers"
GROWTHS = ("constant", "window", "linear")
Mixer = TypeVar("Mixer", bound=type[TokenMixer])

_registry: dict[str, "MixerInfo"] = {}
_plugins_loaded: list[str] = []


@dataclasses.dataclass(frozen=True)
class MixerInfo:
    """What the zoo knows of a mixer; all but `paper` and `op` is read from the class.

    Args:
        name: under which it is registered.
        cls: its class.
        paper: where it was published, such as "arXiv:2404.07904"; "" if nowhere.
        op: the op of seqzoo_kernels that it parametrises; "" if none.
    """

    name: str
    cls: type[TokenMixer]
    paper: str
    op: str

    @property
    def modes(self) -> tuple[str, ...]:
        return self.cls.modes

    @property
    def growth(self) -> str:
        """Of the state with length: "constant", "window" or "linear"."""
        return self.cls.growth

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.cls) or "").partition("\n")[0]

    @property
    def options(self) -> Mapping[str, Any]:
        """Option -> default."""
        return MappingProxyType({name: p.default for name, p in _options(self.cls).items()})


def register_mixer(name: str, *, paper: str = "", op: str = "") -> Callable[[Mixer], Mixer]:
    """Class decorator: make a TokenMixer known as `name`.

    Args:
        name: lower case, such as "hgrn2".
        paper: where it was published, such as "arXiv:2404.07904".
        op: the op of seqzoo_kernels that it parametrises.

    Raises:
        ValueError: the name is taken, or is no identifier.
        TypeError: the class is no TokenMixer.
    """
    if not name.isidentifier() or name != name.lower():
        raise ValueError(f"register_mixer: expected a lower-case identifier as name, got {name!r}.")

    def register(cls: Mixer) -> Mixer:
        if not (isinstance(cls, type) and issubclass(cls, TokenMixer)):
            raise TypeError(f"register_mixer: expected {name!r} to be a subclass of TokenMixer, got {cls!r}.")
        if name in _registry:
            other = _registry[name].cls
            raise ValueError(f"register_mixer: {name!r} is already {other.__module__}.{other.__qualname__}.")
        _registry[name] = MixerInfo(name, cls, paper, op)
        cls.registered_name = name
        return cls

    return register


def list_mixers(pattern: str = "*", *, op: str | None = None, growth: str | None = None) -> list[str]:
    """Names of registered mixers, sorted.

    Args:
        pattern: shell wildcards: "hgr*".
        op: only mixers of that op, such as "linear_scan".
        growth: only mixers whose state grows so: "constant", "window", "linear".

    Raises:
        ValueError: no mixer could have that op or growth.
    """
    _load_plugins()
    _check_filter("op", op, {info.op for info in _registry.values()})
    _check_filter("growth", growth, GROWTHS)
    chosen = (info for info in _registry.values() if op in (None, info.op) and growth in (None, info.growth))
    return sorted(info.name for info in chosen if fnmatch.fnmatchcase(info.name, pattern))


def mixer_info(name: str) -> MixerInfo:
    """The record of a registered mixer.

    Raises:
        ValueError: no mixer has that name; the text says which is closest.
    """
    _load_plugins()
    if name not in _registry:
        raise ValueError(
            f"no mixer is called {name!r}{closest(name, _registry)} Known: {', '.join(list_mixers())}."
        )
    return _registry[name]


def create_mixer(name: str | type[TokenMixer], dim: int, **options: Any) -> TokenMixer:
    """A new mixer of width `dim`.

    Args:
        name: a registered name, a TokenMixer class, or "package.module:Class", which imports that code.
        dim: width D.
        options: of that mixer; `mixer_info(name).options` lists them.

    Raises:
        ValueError: the name is not known or can't be imported, or an option's value is wrong.
        TypeError: an option is not known; the text says which is closest.
    """
    cls = _resolve(name)
    known = _options(cls)
    for option in options:
        if option not in known:
            label = name if isinstance(name, str) else cls.__name__
            raise TypeError(
                f"{label} has no option {option!r}{closest(option, known)} It has: {', '.join(known) or 'none'}."
            )
    return cls(dim, **options)


def mixer_from_config(config: Mapping[str, Any]) -> TokenMixer:
    """`create_mixer(**config)` for a configuration that was read from somewhere: registered names only, so that a file cannot
    have code imported.

    Raises:
        ValueError: the name is missing or not registered. TypeError, ValueError: as `create_mixer`.
    """
    name = config.get("name")
    if not isinstance(name, str) or ":" in name:
        raise ValueError(f"a configuration may name registered mixers only, got {name!r}.")
    return create_mixer(mixer_info(name).cls, **{k: v for k, v in config.items() if k != "name"})


def _check_filter(name: str, value: str | None, known: Collection[str]) -> None:
    if value is not None and value not in known:
        raise ValueError(
            f"list_mixers: expected {name} to be one of {', '.join(sorted(known))}, got {value!r}{closest(value, known)}"
        )


def _resolve(name: str | type[TokenMixer]) -> type[TokenMixer]:
    if isinstance(name, str):
        if ":" not in name:
            return mixer_info(name).cls
        module, _, attribute = name.partition(":")
        try:
            cls = getattr(importlib.import_module(module), attribute, None)
        except ModuleNotFoundError as error:
            raise ValueError(f"create_mixer: {name!r} can't be imported: {error}.") from error
        if cls is None:
            raise ValueError(f"create_mixer: module {module!r} has no {attribute!r}.")
    else:
        cls = name
    if not (isinstance(cls, type) and issubclass(cls, TokenMixer)):
        raise TypeError(
            f"create_mixer: expected a name or a subclass of TokenMixer, got {name!r} ({type(name).__name__})."
        )
    return cls


def _options(cls: type[TokenMixer]) -> dict[str, inspect.Parameter]:
    parameters = list(inspect.signature(cls.__init__).parameters.items())
    return dict(parameters[2:])  # after self and dim


def _load_plugins() -> None:
    """Import what other packages announce under the entry-point group, once; importing registers."""
    if _plugins_loaded:
        return
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except Exception as error:
            raise ImportError(
                f"the mixers of entry point {point.name} = {point.value} could not be loaded: {error}"
            ) from error
    _plugins_loaded.append(ENTRY_POINTS)
