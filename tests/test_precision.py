"""Law 8's formula itself."""

import pytest
import torch

from seqzoo_kernels.precision import allowed_error, check_close, log_decay_scale, sum_scale

EXACT = torch.tensor([[1.0, -4.0], [0.5, 2.0]], dtype=torch.float64)


def test_the_formula():
    reference = EXACT.float()
    reference[1, 1] += 0.25
    eps = torch.finfo(torch.bfloat16).eps
    assert allowed_error(EXACT, reference, torch.bfloat16) == 2 * 0.25 + 8 * eps * 4
    assert allowed_error(EXACT, reference, torch.bfloat16, scale=10.0) == 2 * 0.25 + 8 * eps * 10
    assert allowed_error(EXACT, None, torch.float64) == 1e-9 * 4
    assert allowed_error(EXACT[:0], reference[:0], torch.float32) == torch.finfo(torch.float32).tiny


def test_the_scale_of_a_log_decay_gradient():
    q, dq = torch.tensor([3.0, -8.0]), torch.tensor([1.0, 2.0])
    assert log_decay_scale(torch.tensor([0.5]), q, dq) == 16
    assert log_decay_scale(torch.tensor([20.0]), q, dq) == 20


def test_the_scale_of_a_sum_over_time():
    terms = torch.tensor([[[3.0, 1.0], [-2.5, 1.0]]])  # [B, T, D]
    assert sum_scale(terms.sum((0, 1)), terms) == 5.5
    assert sum_scale(torch.tensor([7.0, 0.0]), terms) == 7


def test_the_message_names_the_worst_element():
    wrong = EXACT.float()
    wrong[1, 0] = 0.75
    with pytest.raises(
        AssertionError, match=r"d_q: .*error 0\.25, allowed 3\.81e-06.*float32.*\(1, 0\).*0\.75.*0\.5"
    ):
        check_close(wrong, EXACT, EXACT.float(), dtype=torch.float32, name="d_q")
    check_close(EXACT.float(), EXACT, EXACT.float(), dtype=torch.float32, name="d_q")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_wrong(value):
    wrong = EXACT.clone()
    wrong[0, 1] = value
    with pytest.raises(AssertionError, match=r"out: 1 elements.*\(0, 1\)"):
        check_close(wrong, EXACT, None, dtype=torch.float64, name="out")
    with pytest.raises(AssertionError, match=r"reference: 1 elements"):
        check_close(EXACT.float(), EXACT, wrong.float(), dtype=torch.float32, name="out")


def test_equal_infinities_are_right():
    exact = torch.tensor([-torch.inf, 1.0], dtype=torch.float64)
    check_close(exact.float(), exact, exact.float(), dtype=torch.float32, name="bias")
    with pytest.raises(AssertionError, match="bias"):
        check_close(-exact.float(), exact, exact.float(), dtype=torch.float32, name="bias")
    with pytest.raises(AssertionError, match="bias"):
        check_close(torch.tensor([-1e30, 1.0]), exact, exact.float(), dtype=torch.float32, name="bias")


def test_shapes_must_agree():
    with pytest.raises(AssertionError, match=r"out: expected shape \(2, 2\), got \(4,\)"):
        check_close(EXACT.flatten(), EXACT, None, dtype=torch.float64, name="out")


def test_complex_results():
    exact = torch.tensor([1 + 2j, 0], dtype=torch.complex128)
    check_close(exact.to(torch.complex64), exact, exact.to(torch.complex64), dtype=torch.float32, name="out")
    with pytest.raises(AssertionError, match="out: law 8"):
        check_close(exact.conj(), exact, None, dtype=torch.float64, name="out")
