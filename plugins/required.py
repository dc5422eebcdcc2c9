"""What a plugin needs to be installed, said plainly where it is not."""

from importlib import metadata


def require(package: str, lowest: str, below: str, extra: str) -> None:
    """Nothing, if `package` is installed in a version from `lowest` on and under `below`.

    Raises:
        ImportError: it is not, with the command that installs it.
    """
    plugin = f"seqzoo_plugins.{extra.replace('-', '_')}"
    install = f'pip install "seqzoo[{extra}]"'
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ImportError(f"{plugin} needs {package}: {install}") from None
    if not _numbers(lowest) <= _numbers(found) < _numbers(below):
        raise ImportError(f"{plugin} needs {package} from {lowest} on and under {below}, got {found}: {install}")


def _numbers(version: str) -> tuple[int, ...]:
    """(5, 22) of "5.22.0rc1", for comparison."""
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)
