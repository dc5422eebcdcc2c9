"""Hypothesis profiles, and memory that is never conveniently zero."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# The laws of an op are written once, in a base class that each op's tests inherit.
_common = {"deadline": None, "suppress_health_check": [HealthCheck.differing_executors, HealthCheck.too_slow]}
settings.register_profile("ci", derandomize=True, database=None, max_examples=12, **_common)
settings.register_profile("explore", max_examples=200, print_blob=True, **_common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Small tensors: a second thread costs more than it brings.
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def poisoned_memory():
    """torch.empty and its kin come filled with NaN (integers: the largest), so that unwritten memory shows.

    PyTorch does this itself in its deterministic mode. A module asks for it by `pytestmark`.
    """
    fill, strict = (
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.are_deterministic_algorithms_enabled(),
    )
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    assert torch.ones(3).new_empty(2, dtype=torch.bfloat16).isnan().all()
    assert torch.empty_like(torch.ones(3, dtype=torch.complex128)).isnan().all()
    yield
    torch.use_deterministic_algorithms(strict)
    torch.utils.deterministic.fill_uninitialized_memory = fill
