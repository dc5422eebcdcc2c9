"""One call of an op as a value: its inputs, what the oracle says, and the comparison of the two by law 8."""

import zlib
from dataclasses import dataclass, field

import oracles
import torch
from torch import Tensor

import seqzoo_kernels
from seqzoo_kernels import precision

ORACLES = {
    "linear_scan": (oracles.torch_linear_scan, oracles.numpy_linear_scan),
    "gated_linear_attention": (
        oracles.torch_gated_linear_attention,
        oracles.numpy_gated_linear_attention,
    ),
    "attention": (oracles.torch_attention, oracles.numpy_attention),
    "causal_conv1d": (oracles.torch_causal_conv1d, oracles.numpy_causal_conv1d),
}
# Every backend, in each mode that it has.
BACKEND_MODES = [
    ("reference", "auto"),
    ("torch", "parallel"),
    ("torch", "chunked"),
    ("torch", "recurrent"),
    ("auto", "auto"),
]
# Inputs that stay in float32 beside half-precision ones.
WIDE = {
    "linear_scan": {"log_decay", "phase", "initial_state"},
    "gated_linear_attention": {"log_decay", "initial_state"},
    "attention": {"log_decay", "past_bias"},
    "causal_conv1d": set(),
}
CONSTANTS = {"d_log_decay", "d_phase"}  # gradients that are sums over time where the input is [D]
WIDE_DTYPE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}
TIMED = {"log_decay", "x", "phase", "q", "k", "v"}


def has_time(name: str, x: Tensor) -> bool:
    return name in TIMED and x.dim() >= 3


@dataclass(eq=False)
class Case:
    """A call of an op: float64 inputs by name, and its options. Attention's state is spread over past_k, past_v, past_bias."""

    op: str
    inputs: dict[str, Tensor]
    options: dict
    lengths: Tensor | None = None  # attention: the tokens that each row's past holds
    memo: dict = field(default_factory=dict)

    def cast(self, dtype: torch.dtype) -> dict[str, Tensor]:
        wide = WIDE_DTYPE.get(dtype, dtype)
        cast = {}
        for name, x in self.inputs.items():
            real = wide if name in WIDE[self.op] or x.is_complex() else dtype
            cast[name] = x.to(COMPLEX[real] if x.is_complex() else real)
        return cast

    def expected_dtypes(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        wide = WIDE_DTYPE.get(dtype, dtype)
        if "phase" in self.inputs:
            return {"out": COMPLEX[wide], "final": COMPLEX[wide]}
        if self.op == "attention":
            expected = {"out": dtype, "final.k": dtype, "final.v": dtype, "final.length": torch.int64}
            return {**expected, "final.bias": wide} if "log_decay" in self.inputs else expected
        return {"out": dtype, "final": dtype if self.op == "causal_conv1d" else wide}

    def initial_state(self, inputs: dict[str, Tensor]):
        if self.op != "attention":
            return inputs.get("initial_state")
        if self.lengths is None:
            return None
        if "log_decay" in inputs:
            return seqzoo_kernels.DecayAttentionState(
                inputs["past_k"], inputs["past_v"], self.lengths, inputs["past_bias"]
            )
        return seqzoo_kernels.AttentionState(inputs["past_k"], inputs["past_v"], self.lengths)

    def call(self, inputs: dict[str, Tensor], state, **extra):
        """The op itself: (out, state)."""
        function = getattr(seqzoo_kernels, self.op)
        given = {n: x for n, x in inputs.items() if not n.startswith(("past_", "initial_state"))}
        return function(**given, initial_state=state, **{**self.options, **extra})

    def run(self, inputs: dict[str, Tensor], **extra) -> dict[str, Tensor]:
        return named(*self.call(inputs, self.initial_state(inputs), **extra))

    def run_split(self, inputs: dict[str, Tensor], cuts: list[int], **extra) -> dict[str, Tensor]:
        """Piece by piece, each going on from the state of the one before."""
        T = next(x.shape[1] for n, x in inputs.items() if has_time(n, x))
        edges = [0, *cuts, T]
        spans = list(zip(edges[:-1], edges[1:], strict=True))
        state, outs = self.initial_state(inputs), []
        for start, end in spans[::-1] if self.options.get("reverse") else spans:
            piece = {n: x[:, start:end] if has_time(n, x) else x for n, x in inputs.items()}
            out, state = self.call(piece, state, **extra)
            outs.append(out)
        return named(torch.cat(outs[::-1] if self.options.get("reverse") else outs, dim=1), state)

    def oracle(self, inputs: dict[str, Tensor], capacity: int | None, *, numpy: bool = False):
        """The oracle's outputs; attention's state has `capacity` slots."""
        function = ORACLES[self.op][numpy]
        options = {n: o for n, o in self.options.items() if n not in ("max_seqlen", "chunk_size")}
        given = {n: x.detach().numpy() if numpy else x for n, x in inputs.items()}
        if self.op == "attention":
            past = [given.pop(n, None) for n in ("past_k", "past_v", "past_bias")]
            if self.lengths is not None:
                options["past"] = (past[0], past[1], self.lengths, past[2])
            options["capacity"] = capacity
        out, final = function(**given, **options)
        if numpy:
            final = (
                tuple(torch.from_numpy(x) for x in final)
                if isinstance(final, tuple)
                else torch.from_numpy(final)
            )
            return named(torch.from_numpy(out), final)
        return named(out, final)


def named(out: Tensor, state) -> dict[str, Tensor]:
    """An op's two results as tensors by name."""
    if isinstance(state, tuple):
        return {
            "out": out,
            **{f"final.{n}": x for n, x in zip(("k", "v", "length", "bias"), state, strict=False)},
        }
    return {"out": out, "final": state}


def evaluate(
    run, inputs: dict[str, Tensor], dtype: torch.dtype, cotangents: str = "random"
) -> dict[str, Tensor]:
    """Outputs and the gradients d_<input> of a fixed random combination of all outputs (or, expanded, of their sum).

    Weights are rounded to `dtype`, so that every dtype differentiates the same function.
    """
    leaves = {n: x.detach().requires_grad_() for n, x in inputs.items()}
    outputs = run(leaves)
    targets, weights = [], []
    for name, y in outputs.items():
        if not y.requires_grad:
            continue
        if cotangents == "sum":
            weight = torch.ones((), dtype=y.dtype).expand(y.shape)
        else:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            kind = torch.complex128 if y.is_complex() else torch.float64
            weight = torch.randn(y.shape, generator=generator, dtype=kind)
            real = torch.view_as_real(weight) if y.is_complex() else weight
            rounded = real.to(dtype).to(torch.float64)
            weight = (torch.view_as_complex(rounded) if y.is_complex() else rounded).to(y.dtype)
            weight = torch.where(torch.isinf(y.detach()), 0.0, weight) if "bias" in name else weight
        targets.append(y)
        weights.append(weight)
    if targets:
        grads = torch.autograd.grad(targets, list(leaves.values()), weights, materialize_grads=True)
    else:
        grads = [torch.zeros_like(x) for x in leaves.values()]
    results = {n: y.detach() for n, y in outputs.items()}
    return {**results, **{f"d_{n}": g for n, g in zip(leaves, grads, strict=True)}}


def place(x: Tensor, layout: str) -> Tensor:
    """The same values, dense ("plain") or strided, transposed and surrounded by NaN ("strided")."""
    if layout == "plain":
        return x
    *lead, last = x.shape
    if len(lead) >= 2:
        lead[0], lead[1] = lead[1], lead[0]
    buffer = torch.full((*lead, 2 * last + 3), torch.nan, dtype=x.dtype)
    view = buffer[..., 1 : 1 + 2 * last : 2]
    view = view.transpose(0, 1) if len(lead) >= 2 else view
    view.copy_(x)
    return view


def check(
    case: Case,
    backend: str,
    mode: str,
    dtype: torch.dtype = torch.float64,
    *,
    layout: str = "plain",
    cotangents: str = "random",
    cuts: list[int] | None = None,
    compiled=None,
    **extra,
) -> dict[str, Tensor]:
    """Compare values, final state and every gradient with the oracle by law 8; return what the op gave."""
    plain = case.cast(dtype)
    extra = {"backend": backend, "mode": mode, **extra}
    inputs = {n: place(x, layout) for n, x in plain.items()}

    def run(leaves):
        if compiled is not None:
            return compiled(leaves)
        return case.run(leaves, **extra) if cuts is None else case.run_split(leaves, cuts, **extra)

    result = evaluate(run, inputs, dtype, cotangents)
    for name, expected in case.expected_dtypes(dtype).items():
        assert result[name].dtype == expected, f"{name}: expected dtype {expected}, got {result[name].dtype}."
    capacity = check_capacity(case, inputs, result) if case.op == "attention" else None
    bound = extra.get(
        "max_seqlen"
    )  # what a pack's state must hold is no rounding matter: the reference hears of it too
    key = (dtype, cotangents, capacity, bound)
    if key not in case.memo:
        case.memo[key] = expectations(case, plain, dtype, cotangents, capacity, bound)
    exact, reference = case.memo[key]
    compare(case, plain, result, exact, reference, dtype, f"{backend}/{mode}")
    return result


def compare(case: Case, inputs, result, exact, reference, dtype: torch.dtype, where: str = "") -> None:
    """Law 8 for each tensor of a call."""
    assert result.keys() == exact.keys() - {"terms"}
    # a rotated state is computed in float32 whatever the dtype of x
    judged = torch.float32 if "phase" in case.inputs and dtype in WIDE_DTYPE else dtype
    for name in result:
        if name == "final.length":
            assert torch.equal(result[name], exact[name])
            continue
        scale = None
        if name == "d_log_decay" and "q" in inputs:
            scale = precision.log_decay_scale(exact[name], inputs["q"], exact["d_q"])
        elif name in CONSTANTS and exact[name].dim() == 1 and "terms" in exact:
            scale = precision.sum_scale(exact[name], exact["terms"])
        precision.check_close(
            result[name],
            exact[name],
            reference and reference[name],
            dtype=judged,
            name=f"{case.op} {where} {name}",
            scale=scale,
        )


def expectations(case, plain, dtype, cotangents, capacity, max_seqlen=None):
    """(X64, ref): the oracle's float64 results, and the plain reference in the dtype itself (None in float64)."""
    wide = {n: x.to(torch.complex128 if x.is_complex() else torch.float64) for n, x in plain.items()}
    exact = evaluate(lambda leaves: case.oracle(leaves, capacity), wide, dtype, cotangents)
    if case.op == "linear_scan":
        exact["terms"] = terms_of_constants(case, wide, dtype, cotangents)
    if dtype == torch.float64:
        return exact, None
    options = (
        {"backend": "reference"} if max_seqlen is None else {"backend": "reference", "max_seqlen": max_seqlen}
    )
    return exact, evaluate(lambda leaves: case.run(leaves, **options), plain, dtype, cotangents)


def terms_of_constants(case: Case, inputs, dtype: torch.dtype, cotangents: str) -> Tensor:
    """|d log_decay + i d phase| [B, T, D], decays and phases written out in time: what a constant's gradient sums."""
    shape = inputs["x"].shape
    inputs = {n: x.expand(shape).clone() if f"d_{n}" in CONSTANTS else x for n, x in inputs.items()}
    found = evaluate(lambda leaves: case.oracle(leaves, None), inputs, dtype, cotangents)
    return torch.hypot(found["d_log_decay"], found.get("d_phase", torch.zeros(())).to(torch.float64))


def check_capacity(case: Case, inputs: dict[str, Tensor], result: dict[str, Tensor]) -> int:
    """Slots of the final state: grown by T, at most the window; packed, enough for each sequence."""
    window, cu = case.options.get("window"), case.options.get("cu_seqlens")
    before = inputs["past_k"].shape[1] if "past_k" in inputs else 0
    T = inputs["k"].shape[1]
    slots = result["final.k"].shape[1]
    grown = before + T if window is None else min(before + T, max(window, before))
    if cu is None:
        assert slots == grown, f"final state: expected {grown} slots, got {slots}."
        return slots
    length = result["final.length"].max().item() if len(result["final.length"]) else 0
    needed = length if window is None else min(length, window)
    assert needed <= slots <= grown, f"final state: expected {needed} to {grown} slots, got {slots}."
    return slots


def gates(shape: tuple[int, ...], kind: str, generator: torch.Generator) -> Tensor:
    """Log-decays: "mild", or "extreme", where saturated, tiny, huge and infinite ones alternate within a chunk."""
    mild = torch.nn.functional.logsigmoid(torch.randn(shape, generator=generator, dtype=torch.float64))
    if kind == "mild":
        return mild
    choices = [0.0, -1e-6, -3.4e-4, -1.0, -20.0, -100.0, -1e3, -1e6, -1e9, -torch.inf]
    if kind == "near_one":
        choices = [0.0, -1e-6, -1e-6, -3.4e-4]
    pick = torch.randint(2 * len(choices), shape, generator=generator)
    special = torch.tensor(choices, dtype=torch.float64)[pick % len(choices)]
    return torch.where(pick < len(choices), special, mild if kind == "extreme" else special)
