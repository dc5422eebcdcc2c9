"""What a plugin needs to be installed, said plainly where it is not."""

import re
from importlib import metadata, util


def require(package: str, lowest: str, below: str, extra: str) -> None:
    """Nothing, if `package` is installed in a version from `lowest` on and under `below`. It is not imported.

    Raises:
        ImportError: it is not, with the command that installs it.
    """
    plugin = f"seqzoo_plugins.{extra.replace('-', '_')}"
    install = f'pip install "seqzoo[{extra}]"'
    if util.find_spec(package.replace("-", "_")) is None:
        raise ImportError(f"{plugin} needs {package}: {install}")
    found = metadata.version(package)
    if not _numbers(lowest) <= _numbers(found) < _numbers(below):
        raise ImportError(
            f"{plugin} needs {package} from {lowest} on and under {below}, got {found}: {install}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """(5, 22, 0) of "5.22.0rc1", for comparison."""
    release = re.match(r"\d+(\.\d+)*", version)
    assert release, version
    return tuple(map(int, release[0].split(".")))
