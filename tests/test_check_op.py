"""The kit that tests any kernel: right ones pass, planted faults are caught by the law they break."""

import types

import pytest
import torch

from seqzoo.testing import OP_LAWS, LawViolation, check_op
from seqzoo.testing.law import SCREEN, rows_of
from seqzoo.testing.op_cases import GATES, VARIANTS, draw_op
from seqzoo.testing.op_examples import op_examples
from seqzoo_kernels.linear_scan import eager


class Right:
    """A kernel of linear_scan to plant faults in."""

    @classmethod
    def forward(cls, log_decay, x, phase, initial_state, cu_seqlens, *options):
        return eager.forward(log_decay, x, phase, initial_state, cu_seqlens, *options)

    @classmethod
    def backward(cls, grad_out, grad_final, out, final, *inputs):
        return eager.backward(grad_out, grad_final, out, final, *inputs)


class IgnoresTheInitialState(Right):
    @classmethod
    def forward(cls, log_decay, x, phase, initial_state, *rest):
        return super().forward(log_decay, x, phase, None, *rest)


class DropsTheFinalStatesGradient(Right):
    @classmethod
    def backward(cls, grad_out, grad_final, *rest):
        return super().backward(grad_out, torch.zeros_like(grad_final), *rest)


class DropsAConstantsGradient(Right):
    @classmethod
    def backward(cls, *given):
        first, *rest = super().backward(*given)
        return (0 * first if first.dim() == 1 else first, *rest)


class KeepsItsStateInHalfPrecision(Right):
    @classmethod
    def forward(cls, log_decay, x, *rest):
        out, final = super().forward(log_decay, x, *rest)
        return out, final if x.is_complex() or final.is_complex() else final.to(x.dtype)


class AssumesDenseInputs(Right):
    @classmethod
    def forward(cls, log_decay, x, *rest):
        return super().forward(log_decay, x.view(-1).view(x.shape), *rest)


class AssumesDenseGradients(Right):
    @classmethod
    def backward(cls, grad_out, *rest):
        return super().backward(grad_out.view(-1).view(grad_out.shape), *rest)


class IsNaNWhereAGateIsClosed(Right):
    @classmethod
    def forward(cls, log_decay, x, *rest):
        out, final = super().forward(log_decay, x, *rest)
        return out + 0 * log_decay, final


class HasANaNGradientAtAClosedGate(Right):
    @classmethod
    def backward(cls, grad_out, grad_final, out, final, log_decay, *rest):
        first, *others = super().backward(grad_out, grad_final, out, final, log_decay, *rest)
        return (first + 0 * log_decay, *others)


class ClampsGates(Right):
    @classmethod
    def forward(cls, log_decay, *rest):
        return super().forward(log_decay.clamp_min(-5), *rest)


class LosesTheStateAtOneToken(Right):
    @classmethod
    def forward(cls, log_decay, x, phase, initial_state, *rest):
        initial_state = None if x.shape[1] == 1 else initial_state
        return super().forward(log_decay, x, phase, initial_state, *rest)


class LeavesTheTailUnwritten(Right):
    @classmethod
    def forward(cls, log_decay, x, phase, initial_state, cu_seqlens, *rest):
        out, final = super().forward(log_decay, x, phase, initial_state, cu_seqlens, *rest)
        if cu_seqlens is None:
            return out, final
        written = torch.empty_like(out)
        written[:, : cu_seqlens[-1]] = out[:, : cu_seqlens[-1]]
        return written, final


class EmptySequencesStartAgain(Right):
    @classmethod
    def forward(cls, log_decay, x, phase, initial_state, cu_seqlens, *rest):
        out, final = super().forward(log_decay, x, phase, initial_state, cu_seqlens, *rest)
        return out, final if cu_seqlens is None else final * (cu_seqlens.diff() > 0)[:, None]


class WritesIntoTheState(Right):
    @classmethod
    def forward(cls, log_decay, x, phase, initial_state, *rest):
        out, final = super().forward(log_decay, x, phase, initial_state, *rest)
        if initial_state is not None and initial_state.shape == final.shape:
            initial_state.copy_(final)
        return out, final


class AddsNoise(Right):
    @classmethod
    def forward(cls, log_decay, x, *rest):
        return super().forward(log_decay, x * (1 + 1e-4 * torch.rand(x.shape)).to(x.dtype), *rest)


FAULTS = {
    IgnoresTheInitialState: "precision",
    DropsTheFinalStatesGradient: "precision",
    DropsAConstantsGradient: "precision",
    KeepsItsStateInHalfPrecision: "precision",
    AssumesDenseInputs: "precision",
    AssumesDenseGradients: "precision",
    IsNaNWhereAGateIsClosed: "extremes",
    HasANaNGradientAtAClosedGate: "extremes",
    ClampsGates: "extremes",
    LosesTheStateAtOneToken: "splitting",
    LeavesTheTailUnwritten: "packing",
    EmptySequencesStartAgain: "packing",
    WritesIntoTheState: "state_value",
    AddsNoise: "state_value",
}


@pytest.mark.parametrize("op", VARIANTS)
def test_the_torch_kernels_are_right(op):
    report = check_op(op, "torch", dtypes=[torch.float32, torch.bfloat16])
    assert [row.law for row in report.rows] == list(OP_LAWS)
    assert {row.outcome for row in report.rows} == {"pass"}
    assert report.subject == f"{op}, backend torch"


def test_a_kernel_of_ones_own():
    assert {row.outcome for row in check_op("linear_scan", Right).rows} == {"pass"}
    module = check_op("linear_scan", eager, laws=["state_value"], modes=["chunked"])
    assert module.subject == "linear_scan, backend seqzoo_kernels.linear_scan.eager"


def test_what_a_kernel_does_not_serve_is_left_out_and_said():
    rows = {row.law: row for row in check_op("attention", "sdpa", dtypes=[torch.float32]).rows}
    assert rows["packing"].outcome == "skip"
    assert "it serves a whole causal pass" in rows["packing"].note
    assert rows["precision"].outcome == "pass"
    assert rows["precision"].examples


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_caught_by_name_and_its_script_shows_it_again(fault):
    law = FAULTS[fault]
    with pytest.raises(LawViolation, match=f"^{law}: ") as caught:
        check_op("linear_scan", fault, laws=[law])
    violation = caught.value
    assert rows_of(str(violation)) <= SCREEN[0]
    assert len(violation.script.splitlines()) == 2
    with pytest.raises(LawViolation, match=f"^{law}: "):
        exec(violation.script, {})


def test_a_kernel_without_a_name_is_named_in_the_script():
    kernel = types.SimpleNamespace(forward=ClampsGates.forward, backward=ClampsGates.backward)
    with pytest.raises(LawViolation) as caught:
        check_op("linear_scan", kernel, laws=["extremes"])
    with pytest.raises(LawViolation):
        exec(caught.value.script, {"backend": kernel})


def test_it_is_gone_afterwards():
    from seqzoo_kernels.linear_scan import BACKENDS

    before = list(BACKENDS)
    with pytest.raises(LawViolation):
        check_op("linear_scan", ClampsGates, laws=["extremes"])
    assert list(BACKENDS) == before


@pytest.mark.parametrize("op", VARIANTS)
def test_every_law_has_examples_of_every_variant(op):
    examples = op_examples(op)
    assert list(examples) == list(OP_LAWS)
    for one in examples.values():
        assert {example["variant"] for example in one.always} == set(VARIANTS[op])


@pytest.mark.parametrize("gate", GATES)
def test_gates_are_of_their_kind(gate):
    drawn = draw_op("linear_scan", length=200, gate=gate).inputs["log_decay"]
    assert (drawn <= 0).all()
    for value in GATES[gate]:
        assert (drawn == value).any()


@pytest.mark.parametrize(
    ("op", "backend", "options", "words"),
    [
        ("linear_scn", "torch", {}, "did you mean 'linear_scan'"),
        ("linear_scan", "tourch", {}, "did you mean 'torch'"),
        ("linear_scan", object(), {}, "forward and backward"),
        ("linear_scan", "torch", {"laws": ["spliting"]}, "did you mean 'splitting'"),
        ("linear_scan", "torch", {"budget": "quik"}, "did you mean 'quick'"),
    ],
)
def test_what_is_wrong_is_said(op, backend, options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        check_op(op, backend, **options)
