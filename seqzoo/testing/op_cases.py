"""A case of an op's law: inputs in float64, by name, with an initial state and options, all drawn from one seed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

import seqzoo_kernels
from seqzoo_kernels import AttentionState, DecayAttentionState

Inputs = dict[str, Tensor]

# Kinds of log-decays: what stands, in turn, beside mild ones.
GATES: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "mild": (),
        "saturated": (0.0, -20.0, -100.0),
        "closed": (-torch.inf,),
        "huge": (-1e9,),
        "tiny": (0.0, -1e-6, -3.4e-4),
        "alternating": (0.0, -1e-6, -1.0, -20.0, -100.0, -1e3, -1e6, -1e9, -torch.inf),
    }
)
# What an op can be given: the words that a variant is made of, the first being the simplest.
VARIANTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "linear_scan": (
            "real",
            "constant",
            "rotated",
            "reverse",
            "rotated varying complex",
            "rotated constant reverse",
        ),
        "gated_linear_attention": (
            "channel",
            "head",
            "none",
            "constant",
            "channel grouped",
            "head grouped scaled",
            "head grouped reverse",
        ),
        "attention": (
            "plain",
            "decay",
            "window=4",
            "decay window=4",
            "decay grouped window=20",
            "grouped scaled",
        ),
        "causal_conv1d": ("4", "4 bias silu", "1 bias", "2 silu", "7 bias"),
    }
)
# Inputs with an entry a token, unless they are constant in time.
TIMED = ("x", "q", "k", "v", "log_decay", "phase")
# Inputs that stay in float32 beside half-precision ones.
WIDE = {"log_decay", "phase", "past_bias"}
WIDE_STATES = {"linear_scan", "gated_linear_attention"}
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True)
class OpCase:
    """A call of an op. Its initial state is among the inputs; attention's is spread over past_k, past_v and past_bias."""

    op: str
    inputs: Inputs
    options: dict[str, Any] = field(default_factory=dict)
    seen: Tensor | None = None  # attention: the tokens that each row's past holds

    def cast(self, dtype: torch.dtype, device: str = "cpu") -> Inputs:
        """The inputs as a user has them who works in `dtype`."""
        wide = WIDER.get(dtype, dtype)
        cast = {}
        for name, x in self.inputs.items():
            keeps = name in WIDE or x.is_complex() or (name == "initial_state" and self.op in WIDE_STATES)
            kind = wide if keeps else dtype
            cast[name] = x.to(device, kind.to_complex() if x.is_complex() else kind)
        return cast

    def dtypes(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Of what the op returns."""
        wide = WIDER.get(dtype, dtype)
        if "phase" in self.inputs:
            return {"out": wide.to_complex(), "state": wide.to_complex()}
        if self.op == "attention":
            kinds = {"out": dtype, "state.k": dtype, "state.v": dtype, "state.length": torch.int64}
            return {**kinds, "state.bias": wide} if "log_decay" in self.inputs else kinds
        return {"out": dtype, "state": wide if self.op in WIDE_STATES else dtype}

    def initial_state(self, inputs: Inputs) -> Any:
        """The state to start from, None if there is none."""
        if self.op != "attention":
            return inputs.get("initial_state")
        if self.seen is None:
            return None
        past = (inputs["past_k"], inputs["past_v"], self.seen.to(inputs["past_k"].device))
        return (
            DecayAttentionState(*past, inputs["past_bias"])
            if "past_bias" in inputs
            else AttentionState(*past)
        )

    def call(self, inputs: Inputs, state: Any, **how: Any) -> tuple[Tensor, Any]:
        """The op itself."""
        given = {name: x for name, x in inputs.items() if not name.startswith(("past_", "initial_state"))}
        device = next(iter(given.values())).device
        options = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in self.options.items()}
        return getattr(seqzoo_kernels, self.op)(**given, initial_state=state, **options, **how)

    def has_time(self, name: str) -> bool:
        """Whether an input has one entry a token."""
        return name in TIMED and self.inputs[name].dim() >= 3

    @property
    def length(self) -> int:
        return self.inputs["x" if "x" in self.inputs else "k"].shape[1]

    @property
    def reverse(self) -> bool:
        return bool(self.options.get("reverse"))

    def part(self, inputs: Inputs, start: int, end: int) -> Inputs:
        """The inputs of some of the tokens."""
        return {name: x[:, start:end] if self.has_time(name) else x for name, x in inputs.items()}


def draw_op(
    op: str,
    *,
    variant: str = "",
    batch: int = 2,
    length: int = 17,
    size: int = 3,
    gate: str = "alternating",
    start: bool = True,
    seed: int = 0,
    lengths: Sequence[int] | None = None,
    tail: int = 0,
    bounded: bool = False,
) -> OpCase:
    """A case of `op`.

    variant  one of VARIANTS[op], by default the first
    size     channels, or the key width of a head
    gate     one of GATES
    start    whether there is an initial state
    lengths  of the sequences of a pack, instead of `batch` and `length`; `tail` NaN tokens stand behind them
    bounded  whether the call is told the longest of them
    """
    rows = batch
    if lengths is not None:
        batch, length, rows = 1, sum(lengths) + tail, len(lengths)
    generator = torch.Generator().manual_seed(seed)
    shape = _Shape(generator, batch, length, rows, size, gate, start)
    case = _DRAWN[op](shape, (variant or VARIANTS[op][0]).split())
    if lengths is None:
        return case
    for name, x in case.inputs.items():
        if case.has_time(name):
            x[:, sum(lengths) :] = torch.nan
    pack: dict[str, Any] = {"cu_seqlens": torch.tensor([0, *accumulate(lengths)])}
    if bounded:
        pack["max_seqlen"] = max(lengths, default=0)
    return OpCase(op, case.inputs, {**case.options, **pack}, case.seen)


@dataclass(frozen=True)
class _Shape:
    generator: torch.Generator
    batch: int
    length: int
    rows: int  # of a state
    size: int
    gate: str
    start: bool

    def normal(self, *shape: int, kind: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=kind)

    def tokens(self, *shape: int, kind: torch.dtype = torch.float64) -> Tensor:
        return self.normal(self.batch, self.length, *shape, kind=kind)

    def gates(self, *shape: int) -> Tensor:
        """Log-decays: half of them mild, half of the gate's own kind; all of them tiny, where that is the kind."""
        mild = torch.nn.functional.logsigmoid(self.normal(*shape))
        values = GATES[self.gate]
        if not values:
            return mild
        pick = torch.randint(2 * len(values), shape, generator=self.generator)
        special = torch.tensor(values, dtype=torch.float64)[pick % len(values)]
        return special if self.gate == "tiny" else torch.where(pick < len(values), special, mild)


def _linear_scan(shape: _Shape, words: list[str]) -> OpCase:
    B, T, D = shape.batch, shape.length, shape.size
    state = torch.complex128 if "rotated" in words else torch.float64
    inputs = {
        "log_decay": shape.gates(D) if "constant" in words else shape.gates(B, T, D),
        "x": shape.tokens(D, kind=torch.complex128 if "complex" in words else torch.float64),
    }
    if "rotated" in words:
        inputs["phase"] = 2 * (shape.tokens(D) if "varying" in words else shape.normal(D))
    if shape.start:
        inputs["initial_state"] = shape.normal(shape.rows, D, kind=state)
    return OpCase("linear_scan", inputs, {"reverse": True} if "reverse" in words else {})


def _heads(shape: _Shape, words: list[str]) -> tuple[Inputs, int, int, dict[str, Any]]:
    """q, k and v, the numbers of heads H and G, and the options."""
    G, H = (2, 4) if "grouped" in words else (1, 1) if shape.size > 12 else (2, 2)
    K, V = shape.size, shape.size + 2
    inputs = {"q": shape.tokens(H, K), "k": shape.tokens(G, K), "v": shape.tokens(G, V)}
    return inputs, H, G, {"scale": 0.7} if "scaled" in words else {}


def _gated_linear_attention(shape: _Shape, words: list[str]) -> OpCase:
    inputs, _, G, options = _heads(shape, words)
    B, T, K = shape.batch, shape.length, shape.size
    decay = {"channel": (B, T, G, K), "head": (B, T, G), "constant": (G,)}.get(words[0])
    if decay:
        inputs["log_decay"] = shape.gates(*decay)
    if shape.start:
        inputs["initial_state"] = shape.normal(shape.rows, G, K, K + 2)
    if "reverse" in words:
        options["reverse"] = True
    return OpCase("gated_linear_attention", inputs, options)


def _attention(shape: _Shape, words: list[str]) -> OpCase:
    """Rows have seen different numbers of tokens; a window's cache has gone round, another has dead slots."""
    inputs, H, G, options = _heads(shape, words)
    K, N, decays = shape.size, shape.rows, "decay" in words
    window = next((int(w.removeprefix("window=")) for w in words if w.startswith("window=")), None)
    if decays:
        inputs["log_decay"] = shape.gates(shape.batch, shape.length, H)
    if window:
        options["window"] = window
    if not shape.start:
        return OpCase("attention", inputs, options)
    slots, counts = (4, [3, 9, 0, 4, 14]) if window == 4 else (7, [4, 7, 0, 2, 5])
    seen = torch.tensor([counts[n % 5] for n in range(N)], dtype=torch.int64)
    past = {"past_k": shape.normal(N, slots, G, K), "past_v": shape.normal(N, slots, G, K + 2)}
    if decays:
        past["past_bias"] = shape.gates(N, slots, H)
    dead = torch.arange(slots) >= seen[:, None]
    for name, x in past.items():
        inputs[name] = x.masked_fill(dead.reshape(N, slots, *(1,) * (x.dim() - 2)), 0)
    return OpCase("attention", inputs, options, seen)


def _causal_conv1d(shape: _Shape, words: list[str]) -> OpCase:
    D, taps = shape.size, int(words[0])
    inputs = {"x": shape.tokens(D), "weight": shape.normal(D, taps)}
    if "bias" in words:
        inputs["bias"] = shape.normal(D)
    if shape.start:
        inputs["initial_state"] = shape.normal(shape.rows, taps - 1, D)
    return OpCase("causal_conv1d", inputs, {"activation": "silu"} if "silu" in words else {})


_DRAWN: Mapping[str, Callable[[_Shape, list[str]], OpCase]] = MappingProxyType(
    {
        "linear_scan": _linear_scan,
        "gated_linear_attention": _gated_linear_attention,
        "attention": _attention,
        "causal_conv1d": _causal_conv1d,
    }
)
