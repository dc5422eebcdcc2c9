"""The docs tell the truth: their Python runs, the README's commands are two, every mixer has its page, no link is dead."""

import json
import math
import re
import xml.etree.ElementTree as ET
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest
from pages import benchmarks, check, zoo
from pages.diagram import diagram
from pages.hook import generated
from pages.records import Record, read
from sybil.document import Document
from sybil.parsers.markdown import PythonCodeBlockParser

import seqzoo
import seqzoo_kernels
from seqzoo import lab, registry, testing

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
MADE = [DOCS / path for path in generated()]  # where a builder without hooks has them written
PAGES = [README, *sorted(set(DOCS.rglob("*.md")) - set(MADE))]
STATES = ("select", "reorder", "repeat", "detach", "map_state", "leaves")
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


@pytest.mark.parametrize("page", [page for page in PAGES if code_blocks(page)], ids=lambda page: page.stem)
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
    assert loop == training_loop(DOCS / "start" / "training-loop.md")
    assert sum(bool(line.strip()) for line in loop.splitlines()) <= 24


def test_readme_has_two_commands():
    blocks = re.findall(
        r"^```(?:bash|sh|shell|console)\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S
    )
    commands = [line for block in blocks for line in block.splitlines()]
    assert len(commands) == 2
    assert all(command.startswith("pip install torch==2.13.0 && ") for command in commands)
    assert [command.split(" && ")[-1] for command in commands] == ["seqzoo compare", "pytest -n auto"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_is_in_the_navigation(page):
    assert page == README or f"{page.relative_to(DOCS)}\n" in (ROOT / "mkdocs.yml").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize(
    "module", [seqzoo, seqzoo.states, seqzoo_kernels, testing, lab], ids=lambda module: module.__name__
)
def test_public_name_is_in_the_reference(module):
    text = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    known = set(re.findall(r"^::: (?:.*\.)?(\w+)$", text, re.M))
    public = [n for n in getattr(module, "__all__", STATES) if not isinstance(getattr(module, n), ModuleType)]
    missing = {name for name in public if name not in known and not isinstance(getattr(module, name), dict)}
    assert not missing


@pytest.fixture(scope="module")
def made():
    return generated()


@pytest.mark.parametrize("name", seqzoo.list_mixers())
def test_mixer_has_its_page(name, made, tmp_path):
    page = made[f"zoo/{name}.md"]
    for heading in (
        "Equation",
        "A step",
        "Use it",
        "Options",
        "State",
        "Differences",
        "Source",
        "Learning curve",
        "Speed",
    ):
        assert f"\n## {heading}" in page
    for said in ("**Shapes.**", "**State.**", "**Weights.**", "A step costs O(", "https://arxiv.org/abs/"):
        assert said in page
    assert "None are noted" not in page
    info = seqzoo.mixer_info(name)
    told = zoo.parse(info.cls).options
    assert set(info.options) <= set(told), "every option has a line under Args"
    assert f"](zoo/{name}.md)" not in made["zoo/index.md"] and f"]({name}.md)" in made["zoo/index.md"]
    for svg in re.findall(r"<svg.*?</svg>", page):
        ET.fromstring(svg)
    path = tmp_path / "page.md"
    path.write_text(page, encoding="utf-8")
    (example,) = code_blocks(path)
    example.evaluate()


def test_zoo_entries_are_those_of_the_registry():
    assert set(zoo.entries()) == set(zoo.names())


def test_missing_entry_and_wrong_arrow_say_so():
    with pytest.raises(ValueError, match=r"docs/zoo.yml: expected an entry 'gla' with arrows, .* got None"):
        zoo.entry("gla", {})
    with pytest.raises(ValueError, match=r"diagram of gla: expected arrows between x, y, got 'z'"):
        diagram("gla", [{"x": "x"}, {"y": "y"}], "x>z")


def test_recorded_runs_have_pages(made):
    assert len(read()) == len(list((DOCS / "benchmarks").glob("*.json")))
    for record in read():
        page = made[f"benchmarks/{record.stem}.md"]
        assert record.date in page and str(record.versions["torch"]) in page
        for svg in re.findall(r"<svg.*?</svg>", page):
            ET.fromstring(svg)


def test_record_of_an_unknown_kind_is_listed(tmp_path):
    data = {
        "date": "2026-01-02",
        "versions": {"torch": "2.0"},
        "colour": "red",
        "rows": [{"a": 1, "b": None}, {"a": [2], "c": {}}],
    }
    (tmp_path / "strange-cpu-2026-01-02.json").write_text(json.dumps(data), encoding="utf-8")
    (record,) = read(tmp_path)
    page = benchmarks.pages([record])["benchmarks/strange-cpu-2026-01-02.md"]
    assert "red" in page and "2026-01-02" in page and "| 1 | – | – |" in page
    assert "Strange cpu" in benchmarks.index([record])


def test_records_of_the_bench_of_an_op():
    ways = {
        "triton": {"forward": 0.1, "forward and backward": 0.3},
        "copy of as many bytes": {"forward": 0.09},
        "fla": {"why": "not installed"},
    }
    row = {"case": "[8, 16] bfloat16", "length": None, "ways": ways, "target": {"forward": 0.2}}
    over_t = [
        {"case": f"over T: real [{8192 // T}, {T}] bfloat16", "length": T, "ways": ways, "target": {}}
        for T in (512, 4096)
    ]
    record = Record(
        "linear_scan-h200-2026-01-02",
        {"date": "2026-01-02", "versions": {"torch": "2.0"}, "rows": [row, *over_t]},
    )
    page = benchmarks.page(record)
    assert "Our goal is 0.2: reached" in page and "not installed" in page
    for what in ("forward", "forward and backward"):
        assert (
            f"over T: real, {what}, as many tokens at each T; the last point is [2, 4096] bfloat16." in page
        )
    assert page.count("milliseconds against T: triton") == 2 and ">4k</text>" in page
    assert "| 0.3 |" in benchmarks.index([record])


def test_learning_curves_of_a_comparison():
    told = {
        "bits_per_byte": {"mean": 2.5, "sd": 0.7, "seeds": {"0": 2.0, "1": 3.0}},
        "curves": {"0": [[100, 3.0], [200, 2.0]], "1": [[100, 4.0], [200, 3.0]]},
    }
    mixers = {"gla": told, "lru": told}
    data = {
        "date": "2026-01-02",
        "versions": {"torch": "2.0"},
        "curve": ["step", "bits_per_byte"],
        "mixers": mixers,
    }
    record = Record("compare-cpu-2026-01-02", data)
    assert "At the end: `gla` 2.5." in zoo.mixer_page("gla", zoo.entries(), [record])
    assert "No learning curve of `hgrn2` is recorded yet." in zoo.mixer_page("hgrn2", zoo.entries(), [record])
    assert "| `lru` | 2.500 ± 0.700 |" in benchmarks.page(record)


def test_check_of_a_built_site_finds_faults(tmp_path):
    good = '<h1 id="top">A</h1><a href="b.html#there">b</a><a href="https://example.org">elsewhere</a>'
    bad = '<p id="there"></p><a href="c.html">c</a><a href="index.html#no">a</a><script src="https://example.org/x.js"></script>'
    (tmp_path / "index.html").write_text(good, encoding="utf-8")
    (tmp_path / "b.html").write_text(bad, encoding="utf-8")
    (tmp_path / "a.css").write_text("a { src: url(gone.woff2) }", encoding="utf-8")
    assert sorted(check.faults(tmp_path)) == [
        "a.css: gone.woff2 is not there",
        "b.html: c.html is not there",
        "b.html: index.html#no has no such anchor",
        "b.html: loads https://example.org/x.js from a network",
    ]
