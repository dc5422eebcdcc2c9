"""The kit is tested by planted faults: each is caught in the quick budget, by the law it breaks, and its script shows it."""

import planted
import pytest

from seqzoo.testing import LAWS, LawViolation, check_mixer
from seqzoo.testing.law import SCREEN, rows_of


def test_there_are_enough():
    assert len(planted.FAULTS) >= 30
    assert set(planted.FAULTS.values()) == set(LAWS)


RIGHT = sorted({(fault.__base__, law) for fault, law in planted.FAULTS.items()}, key=str)


@pytest.mark.parametrize(("mixer", "law"), RIGHT, ids=[f"{mixer.__name__}-{law}" for mixer, law in RIGHT])
def test_what_a_fault_is_planted_in_obeys_the_law(mixer, law):
    assert check_mixer(mixer, laws=[law]).rows[0].outcome == "pass"


@pytest.mark.parametrize("fault", planted.FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_caught_by_name_and_its_script_shows_it_again(fault):
    law = planted.FAULTS[fault]
    with pytest.raises(LawViolation, match=f"^{law}: ") as caught:
        check_mixer(fault, laws=[law])
    violation = caught.value
    assert violation.law == law
    assert rows_of(str(violation)) <= SCREEN[0]
    assert violation.script in str(violation).replace("\n    ", "\n")
    assert len(violation.script.splitlines()) == 2
    with pytest.raises(LawViolation, match=f"^{law}: "):
        exec(violation.script, {})
