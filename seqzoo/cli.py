"""The console command ``seqzoo``: runs the commands and turns what a user can mend into one line on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn, cast

import torch

EXTRA = ("typer", "rich", "torchmetrics", "safetensors", "sklearn")  # what the extra "lab" brings
INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 done, 1 it could not be done, 2 wrong usage, 128 + the signal that stopped it.

    Lines are made of LabError, usage errors, OSError (files, disks) and a missing extra; anything else is a bug and
    keeps its traceback.
    """
    try:
        sys.exit(_run(list(sys.argv[1:] if arguments is None else arguments)))
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing not in EXTRA:
            raise
        _fail(f'this command needs {missing}: pip install "seqzoo[lab]"')
    except KeyboardInterrupt:
        _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (MemoryError, RuntimeError) as error:  # torch's allocators raise RuntimeErrors
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "CPUAllocator" not in str(error):
            raise
        _fail("out of memory: try a smaller batch size, sequence length or width")


def _run(arguments: list[str]) -> int:
    """Run a command; its exit status."""
    import typer

    from seqzoo.lab.commands import app
    from seqzoo.lab.errors import LabError

    # click's UsageError, from whichever click this typer stands on
    usage_error = cast(type[typer.BadParameter], typer.BadParameter.__mro__[1])
    try:
        status = app(arguments or ["--help"], prog_name="seqzoo", standalone_mode=False)
    except LabError as error:
        _fail(str(error), error.status)
    except usage_error as error:
        _fail(f"{error.format_message()} (seqzoo --help)", 2)
    except typer.Abort:
        raise KeyboardInterrupt from None
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    return status or 0


def _fail(text: str, status: int = 1) -> NoReturn:
    print("seqzoo:", " ".join(text.split()), file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
