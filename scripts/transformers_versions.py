"""Run the tests of seqzoo_plugins.transformers beside each minor version of transformers that it is for.

    python scripts/transformers_versions.py [--versions 5.22,5.23]

CI tests the newest. Each version is installed into a folder of its own, without its dependencies: those are there already.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
VERSIONS = "5.22,5.23,5.24"  # 5.25 asks for newer packages than these, so it takes an environment of its own


def main() -> None:
    """Print a line a version; fail if the tests do with any of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versions", default=VERSIONS)
    failed = []
    for version in parser.parse_args().versions.split(","):
        with tempfile.TemporaryDirectory() as folder:
            install = f"-m pip install --quiet --no-deps --target {folder} transformers=={version}.*"
            subprocess.run([sys.executable, *install.split()], check=True)
            tests = "-m pytest -q -p no:cacheprovider tests/test_transformers_plugin.py"
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT)])}
            done = subprocess.run(
                [sys.executable, *tests.split()],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
        summary = next(
            (line for line in reversed(done.stdout.splitlines()) if " passed" in line or " failed" in line),
            "",
        )
        print(f"transformers {version}: {summary.strip('= ')}", flush=True)
        if done.returncode:
            print(done.stdout[-3000:])
            failed.append(version)
    if failed:
        raise SystemExit(f"failed with {', '.join(failed)}")


if __name__ == "__main__":
    main()
