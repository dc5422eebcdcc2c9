"""What all ops share: one set of options, the choice of a backend, and real torch ops behind it."""

import inspect
import subprocess
import sys
from functools import partial

import pytest
import torch
from op_cases import evaluate
from test_attention_op import TestAttention as Attention
from test_causal_conv1d import TestCausalConv1d as CausalConv1d
from test_gated_linear_attention import TestGatedLinearAttention as GatedLinearAttention
from test_linear_scan import TestLinearScan as LinearScan
from torch.utils._python_dispatch import TorchDispatchMode

import seqzoo_kernels
from seqzoo_kernels import use_backend

pytestmark = pytest.mark.usefixtures("poisoned_memory")

OPS = {laws.op: laws() for laws in (LinearScan, GatedLinearAttention, Attention, CausalConv1d)}
each_op = pytest.mark.parametrize("op", OPS)


class Recorder(TorchDispatchMode):
    """The calls of our registered ops, backwards included."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "seqzoo":
            self.calls.append((function, args, kwargs or {}))
        return function(*args, **kwargs or {})


def detached(tree, *, requires_grad):
    """The same arguments as leaves."""

    def leaf(x):
        if not isinstance(x, torch.Tensor):
            return x
        return x.detach().clone().requires_grad_(requires_grad and (x.is_floating_point() or x.is_complex()))

    return torch.utils._pytree.tree_map(leaf, tree)


@pytest.mark.parametrize("cu", [None, [0, 3, 3, 7]])
@each_op
def test_registered_ops_pass_opcheck(op, cu):
    """Schema, autograd registration, fake kernel, and compilation with dynamic shapes.

    The backward ops take part as a compiled backward calls them; torch.compile itself has no second derivatives.
    """
    seen = set()
    for variant, mode in zip(OPS[op].variants, ["chunked", "parallel", "recurrent"], strict=False):
        case = OPS[op].make(variant, T=9, B=2, gate="mild", cu=cu)
        inputs = {n: torch.nan_to_num(x) for n, x in case.inputs.items()}
        with Recorder() as recorder:
            evaluate(
                lambda x, case=case, mode=mode: case.run(x, backend="torch", mode=mode), inputs, torch.float64
            )
        for function, args, kwargs in recorder.calls:
            seen.add(str(function))
            given = detached((args, kwargs), requires_grad="backward" not in str(function))
            result = torch.library.opcheck(function, *given, raise_exception=False)
            wrong = {n: str(r) for n, r in result.items() if r != "SUCCESS"}
            assert not wrong, (str(function), variant, wrong)
    assert len(seen) >= 2, f"expected a forward and a backward op under torch.ops.seqzoo, got {seen}."


@pytest.mark.parametrize("mode", ["parallel", "chunked", "recurrent"])
@each_op
def test_a_dispatch_mode_changes_nothing(op, mode):
    """Flop counters, selective checkpointing and tracers run ops under one, where conjugation is not lazy."""
    for variant in OPS[op].variants:
        case = OPS[op].make(variant, T=19, gate="mild")
        plain = evaluate(
            lambda x, case=case: case.run(x, backend="torch", mode=mode), case.inputs, torch.float64
        )
        with Recorder():
            under = evaluate(
                lambda x, case=case: case.run(x, backend="torch", mode=mode), case.inputs, torch.float64
            )
        for name in plain:
            assert torch.equal(plain[name], under[name]), (variant, name)


@each_op
def test_autocast_leaves_gates_in_float32(op):
    for variant in OPS[op].variants:
        case = OPS[op].make(variant, T=9, gate="mild")
        with Recorder() as recorder, torch.autocast("cpu", torch.bfloat16):
            case.run(case.cast(torch.float32), backend="torch")
        assert recorder.calls
        for function, args, kwargs in recorder.calls:
            names = [argument.name for argument in function._schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            for name in ("log_decay", "phase"):
                if isinstance(given.get(name), torch.Tensor):
                    assert given[name].dtype == torch.float32, name


@each_op
def test_one_name_for_one_option(op):
    parameters = inspect.signature(getattr(seqzoo_kernels, op)).parameters
    for name, default in {
        "initial_state": None,
        "cu_seqlens": None,
        "max_seqlen": None,
        "mode": "auto",
        "backend": "auto",
        "chunk_size": None,
    }.items():
        assert parameters[name].default == default
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters.values())


@each_op
def test_the_docstring_tells_the_equation_and_the_errors(op):
    text = inspect.getdoc(getattr(seqzoo_kernels, op))
    assert "=" in text
    assert "Raises" in text
    for name in inspect.signature(getattr(seqzoo_kernels, op)).parameters:
        assert name in text, f"{op}'s docstring says nothing about {name}"


@each_op
def test_one_return_structure(op):
    """A pair, whatever the length, the mode and whether gradients are asked for."""
    kinds = set()
    for T in (0, 1, 2, 65):
        case = OPS[op].make(OPS[op].variants[0], T=T)
        for mode in ("auto", "parallel", "chunked", "recurrent"):
            for grad in (False, True):
                inputs = {n: x.detach().requires_grad_(grad) for n, x in case.inputs.items()}
                result = case.call(inputs, case.initial_state(inputs), mode=mode)
                assert type(result) is tuple
                assert len(result) == 2
                kinds.add((type(result[1]), result[0].dtype))
    assert len(kinds) == 1


@each_op
def test_an_absent_backend_says_why(op):
    """On a CPU without Triton's interpreter the explicit choice fails, naming what there is."""
    case = OPS[op].make(OPS[op].variants[0], T=3)
    with pytest.raises((ValueError, RuntimeError), match=rf"{op}: .*triton.*(torch|reference)"):
        case.run(case.inputs, backend="triton")


@each_op
def test_use_backend_holds_inside_its_block(op):
    case = OPS[op].make(OPS[op].variants[0], T=40)
    inputs = case.cast(torch.float32)
    plain = case.run(inputs)
    with use_backend("reference"):
        inside = case.run(inputs)
        explicit = case.run(inputs, backend="torch")
        with use_backend("torch"):
            nested = case.run(inputs)
        after_nested = case.run(inputs)
    after = case.run(inputs)
    reference = case.run(inputs, backend="reference")
    torch_backend = case.run(inputs, backend="torch")
    for name in plain:
        assert torch.equal(inside[name], reference[name])
        assert torch.equal(after_nested[name], reference[name])
        assert torch.equal(explicit[name], torch_backend[name])
        assert torch.equal(nested[name], torch_backend[name])
        assert torch.equal(after[name], plain[name])


@each_op
def test_use_backend_ends_with_an_exception(op):
    case = OPS[op].make(OPS[op].variants[0], T=3)
    with pytest.raises((ValueError, RuntimeError), match=rf"{op}: .*triton"), use_backend("triton"):
        case.run(case.inputs)
    case.run(case.inputs)


def test_use_backend_knows_its_names():
    with pytest.raises(ValueError, match=r"'tritn'.*triton|triton.*'tritn'"), use_backend("tritn"):
        pass


@each_op
def test_second_derivatives_through_the_state(op):
    """A penalty on gradients, as a user would write it: the gradient of a gradient through the final state."""
    case = OPS[op].make(OPS[op].variants[0], T=6, gate="mild")
    capacity = case.run(case.inputs)["final.k"].shape[1] if op == "attention" else None
    results = []
    for run in (case.run, partial(case.oracle, capacity=capacity)):
        leaves = {n: x.detach().requires_grad_() for n, x in case.inputs.items()}
        loss = sum((y.abs() ** 2).sum() for y in run(leaves).values() if y.requires_grad)
        grads = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        results.append(torch.autograd.grad(sum((g.abs() ** 2).sum() for g in grads), list(leaves.values())))
    for name, ours, exact in zip(leaves, *results, strict=True):
        seqzoo_kernels.precision.check_close(ours, exact, None, dtype=torch.float64, name=name)


def test_importing_the_kernels_brings_neither_the_zoo_nor_extras():
    code = (
        "import sys, seqzoo_kernels; "
        "extra = {'seqzoo', 'xformers', 'torchmetrics', 'rich', 'typer', 'matplotlib'} & set(sys.modules); "
        "sys.exit(str(extra) if extra else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
