"""What is put to the laws: how a mixer is found, how it is built, and the code that builds it again."""

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import seqzoo
from seqzoo import TokenMixer

from .law import LAWS, LawViolation, arguments

Options = tuple[tuple[str, Any], ...]
Mixer = str | type[TokenMixer] | Callable[[], TokenMixer]

DIM = 16
CHUNK = 16  # so that short inputs meet the edges of chunks


@dataclass(frozen=True)
class Subject:
    """A mixer to test: `make` builds it, and so does the expression `code` after the statement `imports`.

    A factory has no `cls`, and no `options` but its own.
    """

    name: str
    make: Callable[[], TokenMixer]
    code: str
    imports: str
    cls: type[TokenMixer] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    vary: Callable[[Options], "Subject"] | None = None  # the same with other options

    def on(self, device: str) -> "Subject":
        """The same, built on a device."""
        if device == "cpu":
            return self
        make, vary = self.make, self.vary
        return replace(
            self,
            make=lambda: make().to(device),
            code=f"({self.code}).to({device!r})",
            vary=None if vary is None else lru_cache(lambda options: vary(options).on(device)),
        )

    def test(self, law: str, fixed: Mapping[str, Any], example: Mapping[str, Any]) -> None:
        """Test `law` on the two as one example, whose `options` are those of the mixer. A violation has its script."""
        given = {**fixed, **example}
        options = given.pop("options", None)
        varied = self.vary(tuple(sorted(options.items()))) if options and self.vary else self
        try:
            LAWS[law](varied.make, **given)
        except LawViolation as violation:
            violation.script = varied.script(law, violation.example)
            raise

    def script(self, law: str, example: Mapping[str, Any]) -> str:
        """Two lines that test `law` on `example`."""
        return f'{self.imports}\nLAWS["{law}"](lambda: {self.code}, {arguments(example)})'


def subject(mixer: Mixer, options: Mapping[str, Any] | None = None) -> Subject:
    """What `mixer` stands for: a registered name, a class, "package.module:Class", "path/to/file.py:Class" or a factory.

    A mixer that is not a factory is built with DIM and `options`, with chunks of CHUNK where it has that option.

    Raises:
        ValueError, TypeError, ImportError: there is no such mixer, or it cannot be built so.
    """
    if isinstance(mixer, str) or (isinstance(mixer, type) and issubclass(mixer, TokenMixer)):
        return _created(mixer, dict(options or {}))
    if not callable(mixer):
        raise TypeError(f"expected a mixer's name, its class or a factory, got {type(mixer).__name__}.")
    if options:
        raise TypeError("options are for a name or a class; a factory has its own.")
    name = getattr(mixer, "__qualname__", "make")
    module = getattr(mixer, "__module__", "")
    imports = "import torch, seqzoo; from seqzoo.testing import LAWS"
    if name.isidentifier() and module != "__main__" and _found(module, name) is mixer:
        code, imports = f"{name}()", f"{imports}; from {module} import {name}"
    else:
        code, imports, name = "make()", f"{imports}  # make: your factory", "the factory"
    make: Callable[[], Any] = mixer
    return _tried(Subject(name, make, code, imports))


def find_mixer(name: str) -> type[TokenMixer]:
    """The class of a registered name, of "package.module:Class" or of "path/to/file.py:Class".

    Raises:
        ValueError, TypeError, ImportError: there is none; the text says why.
    """
    place, _, attribute = name.rpartition(":")
    if not place.endswith(".py"):
        return _class(name) if ":" in name else seqzoo.mixer_info(name).cls
    module = _load(Path(place))
    cls = getattr(module, attribute, None)
    if not (isinstance(cls, type) and issubclass(cls, TokenMixer)):
        known = [k for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, TokenMixer)]
        raise ValueError(f"{place} has no mixer {attribute!r}; it has {', '.join(known) or 'none'}.")
    return cls


def importable(thing: Any) -> bool:
    """Whether a class or a function is found by its module and name, as pickle and a config find it."""
    name = getattr(thing, "__qualname__", "")
    return bool(name) and _found(getattr(thing, "__module__", ""), name) is thing


def _created(mixer: str | type[TokenMixer], options: dict[str, Any]) -> Subject:
    cls = find_mixer(mixer) if isinstance(mixer, str) else mixer
    if "chunk_size" in inspect.signature(cls.__init__).parameters:
        options.setdefault("chunk_size", CHUNK)
    imports = "import torch, seqzoo; from seqzoo.testing import LAWS"
    if isinstance(mixer, str) and mixer.rpartition(":")[0].endswith(".py"):
        named, imports = f"find_mixer({mixer!r})", imports + ", find_mixer"
    elif isinstance(mixer, str):
        named = repr(mixer)
    elif importable(cls) and cls.__module__ != "__main__":
        named = repr(f"{cls.__module__}:{cls.__qualname__}")
    else:  # to be pasted where it is defined
        named = cls.__name__
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    return _tried(
        Subject(
            mixer if isinstance(mixer, str) else cls.__name__,
            lambda: seqzoo.create_mixer(cls, DIM, **options),
            f"seqzoo.create_mixer({named}, {DIM}{given})",
            imports,
            cls,
            options,
            lru_cache(lambda others: _created(mixer, {**options, **dict(others)})),
        )
    )


def _tried(subject: Subject) -> Subject:
    try:
        built = subject.make()
    except (ValueError, TypeError, ImportError):
        raise
    except Exception as error:
        raise ValueError(
            f"{subject.name} could not be built: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error
    if not isinstance(built, TokenMixer):
        raise TypeError(f"{subject.name} makes a {type(built).__name__}, expected a TokenMixer.")
    return subject


def _class(name: str) -> type[TokenMixer]:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        raise ValueError(f"{name!r} can't be imported: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, TokenMixer)):
        raise ValueError(f"module {module!r} has no mixer {attribute!r}.")
    return found


def _load(path: Path) -> Any:
    """The module in a file, loaded once; a name of its own keeps it from hiding another module."""
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}.")
    place = str(path.resolve())
    name = f"seqzoo_checked_{path.stem}_{hashlib.sha256(place.encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: pickle and dataclasses look there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ImportError(f"{path} could not be imported: {type(error).__name__}: {error}") from error
    return module


def _found(module: str, qualname: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found
