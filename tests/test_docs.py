"""The docs tell the truth: their Python runs, the README's commands are two, every mixer has its line."""

import math
import re
from importlib import util
from pathlib import Path

import pytest
from sybil.document import Document
from sybil.parsers.markdown import PythonCodeBlockParser

import seqzoo
from seqzoo import registry

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
NAME = 'name = "hgrn2"'


def code_blocks(page):
    return list(Document.parse(str(page), PythonCodeBlockParser()).examples())


def training_loop(page):
    (loop,) = [example.parsed for example in code_blocks(page) if NAME in example.parsed]
    return str(loop)


@pytest.fixture
def own_registry(monkeypatch):
    """What a page registers is forgotten after it."""
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))


@pytest.mark.parametrize("page", [page for page in PAGES if code_blocks(page)], ids=lambda page: page.name)
def test_code_runs(page, own_registry):
    if page.name == "torchtitan.md" and util.find_spec("torchtitan") is None:
        pytest.skip("without torchtitan, which .ci/run adds")
    for example in code_blocks(page):  # the blocks of a page share one namespace
        example.evaluate()


@pytest.mark.parametrize("name", seqzoo.list_mixers())
def test_training_loop_runs_with_each_name(name):
    namespace = {}
    exec(training_loop(README).replace(NAME, f"name = {name!r}"), namespace)
    assert type(namespace["mixer"]) is seqzoo.mixer_info(name).cls
    assert namespace["loss"].item() < math.log(256)  # better than a uniform guess


def test_training_loop_is_short_and_the_same_in_the_docs():
    loop = training_loop(README)
    assert loop == training_loop(ROOT / "docs" / "train-loop.md")
    assert sum(bool(line.strip()) for line in loop.splitlines()) <= 24


def test_readme_has_two_commands():
    blocks = re.findall(
        r"^```(?:bash|sh|shell|console)\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S
    )
    commands = [line for block in blocks for line in block.splitlines()]
    assert len(commands) == 2
    assert all(command.startswith("pip install torch==2.13.0 && ") for command in commands)
    assert [command.split(" && ")[-1] for command in commands] == ["seqzoo compare", "pytest -n auto"]


@pytest.mark.parametrize("name", seqzoo.list_mixers())
def test_mixer_has_its_line(name):
    cls = seqzoo.mixer_info(name).cls
    lines = (ROOT / "docs" / "mixers.md").read_text(encoding="utf-8").splitlines()
    assert f"::: {cls.__module__}.{cls.__qualname__}" in lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_is_in_the_navigation(page):
    assert page == README or f": {page.name}" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
