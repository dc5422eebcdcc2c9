"""The error a user of the lab is meant to read."""

from collections.abc import Iterator
from contextlib import contextmanager


class LabError(ValueError):
    """Something a user asked for cannot be done; the text is one line that says what and what to do instead.

    The command line turns this error, and this one alone among ValueErrors, into a line without a traceback: any
    other ValueError is a bug of ours and shows where it happened.
    """

    status = 1  # of the process that ends with it


class Interrupted(LabError):
    """A signal asked the run to stop, and it has stopped in good order."""

    def __init__(self, text: str, signal: int) -> None:
        super().__init__(text)
        self.status = 128 + signal  # as a shell reports it


@contextmanager
def asked_by_user() -> Iterator[None]:
    """Around a call that checks what a user named, and does little else: what it finds wrong is a LabError."""
    try:
        yield
    except (ValueError, TypeError, ImportError) as error:
        raise LabError(str(error)) from error
