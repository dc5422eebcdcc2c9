"""The laws as a class of tests, to subclass in a test suite."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from .kit import check_mixer
from .law import LAWS
from .subject import Mixer


class MixerLaws:
    """One test a law, for pytest:

        class TestMyMixer(MixerLaws):
            mixer = MyMixer

    Class attributes:
        mixer: what `check_mixer` takes: a name, a class, or a function that builds one.
        options, budget, seed: as in `check_mixer`.
    """

    mixer: ClassVar[Mixer]
    options: ClassVar[Mapping[str, Any] | None] = None
    budget: ClassVar[str] = "quick"
    seed: ClassVar[int] = 0

    @classmethod
    def check(cls, law: str) -> None:
        """Test one law; skip, if it can't be tested here."""
        report = check_mixer(cls.mixer, options=cls.options, laws=[law], budget=cls.budget, seed=cls.seed)
        skip_if_skipped(report.rows[0].outcome, report.rows[0].note)


def skip_if_skipped(outcome: str, note: str) -> None:
    """Tell pytest that a law was not tested."""
    if outcome == "skip":
        import pytest

        pytest.skip(note)


def _test(law: str) -> Callable[[MixerLaws], None]:
    def test(self: MixerLaws) -> None:
        self.check(law)

    test.__name__ = f"test_{law}"
    test.__qualname__ = f"MixerLaws.test_{law}"
    return test


for _law in LAWS:
    setattr(MixerLaws, f"test_{_law}", _test(_law))
