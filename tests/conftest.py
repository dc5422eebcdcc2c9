"""Hypothesis profiles, memory that is never conveniently zero, and the command line."""

import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

import seqzoo.testing

# The laws of an op are written once, in a base class that each op's tests inherit.
_common = {"deadline": None, "suppress_health_check": [HealthCheck.differing_executors, HealthCheck.too_slow]}
settings.register_profile("ci", derandomize=True, database=None, max_examples=12, **_common)
settings.register_profile("explore", max_examples=200, print_blob=True, **_common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Small tensors: a second thread costs more than it brings.
torch.set_num_threads(1)


LONG = {
    "test_interpreted",
    "test_both_passes",
    "test_nothing_new_is_compiled",
    "test_two_processes_compute_what_one_does",
}


def pytest_collection_modifyitems(items):
    """The longest first: one that began last would keep one worker busy for minutes after the others are done."""
    items.sort(key=lambda item: getattr(item, "originalname", None) not in LONG)


def pytest_collection_finish():
    """The garbage collector need not look through what is imported by now, nor after every 700 objects of a traced graph."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="module")
def poisoned_memory():
    """torch.empty and its kin come filled with NaN (integers: the largest). A module asks for it by `pytestmark`."""
    with seqzoo.testing.poisoned_memory():
        assert torch.empty(3).isnan().all()
        assert torch.ones(3).new_empty(2, dtype=torch.bfloat16).isnan().all()
        assert torch.empty_like(torch.ones(3, dtype=torch.complex128)).isnan().all()
        yield


@pytest.fixture
def seqzoo_cli(capsysbinary):
    """Runs a command line; its status, stdout and stderr."""
    from seqzoo.cli import main

    threads = torch.get_num_threads()

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        out, err = (part.decode("utf-8", "surrogateescape") for part in capsysbinary.readouterr())
        return stopped.value.code, out, err

    yield run
    torch.set_num_threads(threads)


@pytest.fixture
def text(tmp_path):
    """The path of a small text."""
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return str(path)
