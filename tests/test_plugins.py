"""What holds for every plugin: its framework is imported when asked for, and a missing or wrong one is said;
and with every framework a killed run goes on (scripts/plugin_battery.py has every mixer)."""

import json
import os
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# plugin: (package, an older version, the newest that would be too new)
FRAMEWORKS = {
    "transformers": ("transformers", "5.21.3", "6.0.0"),
    "lightning": ("lightning", "2.4.0", "3.0"),
    "lm_eval": ("lm-eval", "0.4.12", "0.5"),
    "torchtitan": ("torchtitan", "0.2.2", "0.4.0"),
}
each_framework = pytest.mark.parametrize("plugin", FRAMEWORKS)
HAS_TORCHTITAN = util.find_spec("torchtitan") is not None  # not among the tests' needs; .ci/run adds it


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)


def says(plugin: str, before: str) -> str:
    """The last line of the error that importing a plugin gives."""
    done = python(f"import sys; {before}; import seqzoo_plugins.{plugin}")
    assert done.returncode
    return done.stderr.strip().splitlines()[-1]


@each_framework
def test_without_the_framework_it_says_what_to_install(plugin):
    package, *_ = FRAMEWORKS[plugin]
    extra = plugin.replace("_", "-")
    expected = f'ImportError: seqzoo_plugins.{plugin} needs {package}: pip install "seqzoo[{extra}]"'
    assert says(plugin, f"sys.modules[{package.replace('-', '_')!r}] = None") == expected


@each_framework
def test_another_version_is_said(plugin):
    package, old, new = FRAMEWORKS[plugin]
    if plugin == "torchtitan" and not HAS_TORCHTITAN:
        pytest.skip("without torchtitan")
    for version in (old, new):
        line = says(plugin, f"from importlib import metadata; metadata.version = lambda _: {version!r}")
        assert line.startswith(f"ImportError: seqzoo_plugins.{plugin} needs {package} from ")
        assert f"got {version}: pip install" in line


def test_a_version_that_is_a_candidate_is_read():
    from seqzoo_plugins.required import _numbers

    assert _numbers("5.22.0rc1") == _numbers("5.22.0+cpu") == (5, 22, 0)


def test_nothing_is_imported_unasked():
    """Of the frameworks, by seqzoo or by a plugin for another one."""
    heavy = ["transformers", "lightning", "lm_eval", "torchtitan", "x_transformers"]
    for imported in ("seqzoo, seqzoo_plugins", "seqzoo_plugins.swap"):
        done = python(f"import sys, {imported}; print(*[m for m in {heavy} if m in sys.modules])")
        assert done.stdout.split() == [], done.stderr


def test_the_extras_are_what_the_plugins_check():
    needs = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for wanted in ("transformers>=5.22,<6", "lightning>=2.5", "lm-eval>=0.4.13", "torchtitan==0.3.*"):
        assert f'"{wanted}' in needs, wanted


# one pattern in CI; torchrun -m seqzoo train is in test_training.py
KILLED = {
    "swap": "lru",
    "transformers": "hgrn2+attention",
    "lightning": "gla",
    "fsdp2": "hgru",
    "torchtitan": "hgrn2",
}


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
@pytest.mark.parametrize("framework", KILLED)
def test_a_killed_run_learns_resumes_and_generates_the_same(framework, tmp_path):
    if framework == "torchtitan" and not HAS_TORCHTITAN:
        pytest.skip("without torchtitan")
    out = tmp_path / "rows.json"
    command = [sys.executable, "scripts/plugin_battery.py", "--frameworks", framework, "--json", str(out)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        [*command, "--mixers", KILLED[framework], "--steps", "90"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    (row,) = json.loads(out.read_text())["rows"]
    assert row["loss"] < row["unigram_entropy"]
    assert row["learns"]
    assert row["died_of_sigkill"]
    assert row["same_loss"]
    assert row["same_weights"]
    assert row["same_text"]
