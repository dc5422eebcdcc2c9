"""Tasks by name: register, list, describe, create."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

from seqzoo.errors import closest
from seqzoo.lab.compare import Comparison
from seqzoo.lab.errors import LabError
from seqzoo.lab.train import Task

Maker = TypeVar("Maker", bound=Callable[..., Task])

_registry: dict[str, TaskInfo] = {}


@dataclasses.dataclass(frozen=True)
class TaskInfo:
    """What the lab knows of a task."""

    name: str
    make: Callable[..., Task]  # a class, or a function of the options
    comparison: Comparison  # what `seqzoo compare` runs where it is not told otherwise

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.make) or "").partition("\n")[0]

    @property
    def options(self) -> Mapping[str, Any]:
        """Option -> default."""
        parameters = inspect.signature(self.make).parameters
        return MappingProxyType({name: p.default for name, p in parameters.items()})


def register_task(name: str, comparison: Comparison) -> Callable[[Maker], Maker]:
    """Decorator: make a Task's class, or a function that returns one, known as ``name``; ValueError if that is taken."""

    def register(make: Maker) -> Maker:
        if name in _registry:
            raise ValueError(f"register_task: {name!r} is already {_registry[name].make!r}.")
        _registry[name] = TaskInfo(name, make, comparison)
        if isinstance(make, type):
            make.name = name  # type: ignore[attr-defined]
        return make

    return register


def list_tasks() -> list[str]:
    """Names of registered tasks, sorted."""
    return sorted(_registry)


def task_info(name: str) -> TaskInfo:
    """The record of a registered task; LabError says which name is closest."""
    if name not in _registry:
        raise LabError(
            f"task: no task is called {name!r}{closest(name, _registry)} Known: {', '.join(list_tasks())}"
        )
    return _registry[name]


def create_task(name: str, **options: Any) -> Task:
    """A task by its name. LabError for a name, an option or a value that it does not have."""
    info = task_info(name)
    hints = get_type_hints(info.make)
    for option, value in options.items():
        if option not in info.options:
            raise LabError(
                f"task: {name} has no option {option!r}{closest(option, info.options)} "
                f"It takes: {', '.join(info.options)}"
            )
        if not _fits(value, hints[option]):
            expected = hints[option].__name__ if isinstance(hints[option], type) else hints[option]
            raise LabError(f"{name}: {option}: expected {expected}, got {value!r}")
    return info.make(**options)


def _fits(value: object, hint: Any) -> bool:
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)
