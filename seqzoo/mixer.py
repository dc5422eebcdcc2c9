"""The contract that every token mixer obeys. Read this first."""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from seqzoo_kernels.checks import check_cu_seqlens, check_mode, state_dtype

from .errors import closest
from .packing import Pack, Padding
from .states import leaves, map_state

Shared = Mapping[str, Tensor]


class ParamRule(NamedTuple):
    """How a parameter is trained: its share of the learning rate, and whether weight decay applies."""

    lr_scale: float = 1.0
    decay: bool = True


class TokenMixer(nn.Module):
    """A layer that mixes tokens along time: x [B, T, D] -> y [B, T, D], and a state to go on from.

        y, state = mixer(x)
        y, state = mixer(x2, state)

    An author writes `__init__`, `init_state` and `mix`; checks, padding and defaults are done here. Options are recorded
    as they are passed, so `config` needs no help.

    Class attributes:
        modes: the modes it has, of "parallel", "chunked" and "recurrent".
        growth: of its state with length: "constant", "window" or "linear".
        reads: what it takes through `shared`: name -> "channel" (a tensor [width]) or "token" ([B, T, ...]).

    Args:
        dim: width D, a multiple of 4 and at least 16.

    Raises:
        ValueError: dim is not as above.
    """

    modes: ClassVar[tuple[str, ...]] = ("parallel", "chunked", "recurrent")
    growth: ClassVar[str] = "constant"
    reads: ClassVar[Mapping[str, str]] = MappingProxyType({})
    registered_name: ClassVar[str | None] = None
    _state_shapes: tuple[type, list[torch.Size]]

    def __init__(self, dim: int) -> None:
        super().__init__()
        if not isinstance(dim, int) or dim < 16 or dim % 4:
            raise ValueError(
                f"{type(self).__name__}: expected dim to be a multiple of 4 and at least 16, got {dim!r}."
            )
        self.dim = dim
        self._like = torch.empty(0)  # where a mixer without parameters is, and in which dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._like = fn(self._like)
        return super()._apply(fn, recurse)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__ or not hasattr(cls.__init__, "__wrapped__"):
            cls.__init__ = _recording(cls.__init__)  # type: ignore[method-assign]

    # what an author writes

    def init_state(self, batch: int, capacity: int | None = None) -> Any:
        """The state before the first token: a NamedTuple of tensors, batch first.

        `capacity` is the room, in tokens, of a state that grows; others have no use for it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no init_state.")

    def reserve(self, state: Any, room: int) -> Any:
        """The state with room for `room` more tokens in every row, for `step` with `donate`.

        A state that grows overrides this; others need no room and are returned as they are. The tensors may be those of
        the state given.
        """
        return state

    def mix(self, x: Tensor, state: Any, *, pack: Pack, mode: str, shared: Shared) -> tuple[Tensor, Any]:
        """y and the new state; everything has been checked. With `pack.cu_seqlens`, x is [1, T, D] and states have batch N."""
        raise NotImplementedError(f"{type(self).__name__} has no mix.")

    def mix_in_place(self, x: Tensor, state: Any, *, shared: Shared) -> tuple[Tensor, Any]:
        """`mix` of one token [B, 1, D] that writes into `state` and returns it. Overwrite it where copying costs."""
        y, new = self.mix(x, state, pack=Pack(), mode="recurrent", shared=shared)
        return y, map_state(Tensor.copy_, state, new)

    def shared_dim(self, name: str) -> int:
        """Width of the "channel" tensor `name` that it reads."""
        return self.dim

    def param_rule(self, name: str, parameter: Tensor) -> ParamRule:
        """How its parameter `name` is trained, for `seqzoo.param_groups`: matrices decay, vectors do not."""
        return ParamRule(decay=parameter.dim() >= 2)

    def param_groups(self, *, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """Groups of its parameters for a torch optimiser: `seqzoo.param_groups`, which takes a whole model, of it alone."""
        from .optim import param_groups

        return param_groups(self, lr=lr, weight_decay=weight_decay)

    # what a user calls

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        *,
        mode: str = "auto",
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        shared: Shared | None = None,
        **misspelt: NoReturn,
    ) -> tuple[Tensor, Any]:
        """Mix a batch of sequences, or go on from where `state` stopped.

        Args:
            x: [B, T, D].
            state: what an earlier call returned, or `init_state`; by default the start of the sequence. It is not changed.
            mode: "parallel", "chunked" or "recurrent" as far as `modes` has them: the same result by another route. "auto"
                chooses.
            mask: [B, T] bool, True where there is a token. Pads may stand anywhere; what they hold changes nothing, and y is 0
                there.
            cu_seqlens: [N + 1] integers: x is one row, B = 1, of N sequences, sequence n being the tokens cu_seqlens[n] to
                cu_seqlens[n + 1] - 1. States have batch N; y is 0 behind the last sequence.
            max_seqlen: a bound on the longest sequence of a pack, known to the host; without one it is read where that is
                free, on a CPU, and is T elsewhere.
            shared: tensors that couple layers, for the names in `reads`; without them a default.

        Returns:
            (y, state): y [B, T, D] in x's dtype and the state after the last token.

        Raises:
            ValueError: a shape, mode or combination is not as above.
            TypeError: a dtype, a name in `shared`, or the kind of state is not as above.
        """
        self._refuse(misspelt, ("state", "mode", "mask", "cu_seqlens", "max_seqlen", "shared"))
        self._check_input(x, 3, "B, T, D")
        check_mode(type(self).__name__, mode, ("auto", *self.modes))
        check_cu_seqlens(type(self).__name__, cu_seqlens, x.shape[0])
        rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        shared = self._check_shared(shared, x.shape[:2])
        state = self._check_state(state, rows)
        pack = Pack(cu_seqlens, max_seqlen)
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError(f"{type(self).__name__}: expected mask or cu_seqlens, not both.")
            padding = Padding.of(type(self).__name__, mask, x.shape[:2])
            pack = padding.pack
            tokens = [name for name in shared if self.reads[name] == "token"]
            shared = {**shared, **{name: padding.join(shared[name]) for name in tokens}}
            y, state = self.mix(padding.join(x), state, pack=pack, mode=mode, shared=shared)
            return padding.split(y).to(x.dtype), state
        if cu_seqlens is not None:
            dead = (torch.arange(x.shape[1], device=x.device) >= cu_seqlens[-1])[:, None]
            y, state = self.mix(x.masked_fill(dead, 0), state, pack=pack, mode=mode, shared=shared)
            return y.masked_fill(dead, 0).to(x.dtype), state
        y, state = self.mix(x, state, pack=pack, mode=mode, shared=shared)
        return y.to(x.dtype), state

    def step(
        self,
        x_t: Tensor,
        state: Any,
        *,
        shared: Shared | None = None,
        donate: bool = False,
        **misspelt: NoReturn,
    ) -> tuple[Tensor, Any]:
        """One token for every row: x_t [B, D] -> y_t [B, D], and the state after it.

        With `donate` the state given is consumed: it is written in place and returned, so its memory stays where it is. A
        growing state then needs room, `init_state(batch, capacity=...)` or `reserve(state, room)`; a full one is an error.

        Raises:
            ValueError, TypeError: as `forward`; a full state with `donate` is a ValueError.
        """
        self._refuse(misspelt, ("shared", "donate"))
        self._check_input(x_t, 2, "B, D")
        x = x_t[:, None]
        shared = self._check_shared(shared, x.shape[:2])
        state = self._check_state(state, x.shape[0])
        if donate:
            y, state = self.mix_in_place(x, state, shared=shared)
        else:
            y, state = self.mix(x, state, pack=Pack(), mode="recurrent", shared=shared)
        return y[:, 0].to(x.dtype), state

    def state_size(self, length: int) -> int:
        """Bytes that the state of one sequence holds after `length` tokens."""
        dtype = self._first_parameter().dtype
        with torch.device("meta"):
            twin = type(self)(**self._options()).to(dtype)
            return sum(t.numel() * t.element_size() for t in leaves(twin.init_state(1, capacity=length)))

    @property
    def config(self) -> dict[str, Any]:
        """A JSON-able record of it: `create_mixer(**config)` builds the same mixer, untrained."""
        cls = type(self)
        options = {k: list(v) if isinstance(v, tuple) else v for k, v in self._options().items()}
        return {"name": cls.registered_name or f"{cls.__module__}:{cls.__qualname__}", **options}

    # for authors

    def zeros(self, batch: int, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros [batch, *shape] where the parameters live, by default in the dtype of recurrent states: float32 (float64 for
        float64 parameters)."""
        own = self._first_parameter()
        return torch.zeros(batch, *shape, dtype=dtype or state_dtype(own.dtype), device=own.device)

    def _options(self) -> dict[str, Any]:
        return dict(self.__dict__["_init_options"])

    def _refuse(self, misspelt: Mapping[str, Any], known: tuple[str, ...]) -> None:
        for key in misspelt:
            raise TypeError(
                f"{type(self).__name__}: unexpected keyword argument {key!r}{closest(key, known)}"
            )

    def _check_input(self, x: Tensor, dims: int, letters: str) -> None:
        name = type(self).__name__
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected x to be a tensor, got {type(x).__name__}.")
        if x.dim() != dims or x.shape[-1] != self.dim:
            raise ValueError(
                f"{name}: expected x of shape ({letters}) with D={self.dim}, got {tuple(x.shape)}."
            )
        own = self._first_parameter()
        expected = x.dtype if torch.is_autocast_enabled(x.device.type) else own.dtype
        if not x.is_floating_point() or x.dtype != expected:
            raise TypeError(f"{name}: expected x of dtype {expected}, as its parameters are, got {x.dtype}.")

    def _first_parameter(self) -> Tensor:
        for module in self.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    return parameter
        return self._like

    def _check_state(self, state: Any, rows: int) -> Any:
        if state is None:
            return self.init_state(rows)
        name = type(self).__name__
        kind, shapes = self._state_shapes
        if type(state) is not kind:
            raise TypeError(f"{name}: expected a state of type {kind.__name__}, got {type(state).__name__}.")
        for got, want in zip(leaves(state), shapes, strict=True):
            free = 0 if self.growth == "constant" or not want else 1  # slots of a cache
            if got.shape[0] != rows or got.shape[1 + free :] != want[free:]:
                raise ValueError(
                    f"{name}: expected a state of batch {rows} with tensors such as {(rows, *want)}, "
                    f"got {tuple(got.shape)}."
                )
        return state

    def _check_shared(self, shared: Shared | None, tokens: torch.Size) -> Shared:
        if shared is None:
            return {}
        for key, value in shared.items():
            if key not in self.reads:
                known = ", ".join(self.reads) or "nothing"
                raise TypeError(
                    f"{type(self).__name__} reads {known} from shared, got {key!r}{closest(key, self.reads)}"
                )
            expected = (self.shared_dim(key),) if self.reads[key] == "channel" else tuple(tokens)
            if value.shape[: len(expected)] != expected or (
                self.reads[key] == "channel" and value.dim() != 1
            ):
                raise ValueError(
                    f"{type(self).__name__}: expected shared[{key!r}] of shape {expected}, got {tuple(value.shape)}."
                )
        return shared

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in self._options().items())


def _recording(init: Callable[..., None]) -> Callable[..., None]:
    """An `__init__` that remembers the options it was called with, those of the outermost class."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def recorded(self: TokenMixer, *args: Any, **kwargs: Any) -> None:
        if "_init_options" not in self.__dict__:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            self.__dict__["_init_options"] = dict(list(bound.arguments.items())[1:])
            init(self, *args, **kwargs)
            start = self.init_state(0)
            self.__dict__["_state_shapes"] = type(start), [leaf.shape[1:] for leaf in leaves(start)]
        else:
            init(self, *args, **kwargs)

    return recorded
