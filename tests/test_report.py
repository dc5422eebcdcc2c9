"""The report: what it reads, how it merges, and a page that needs nothing else."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from seqzoo.lab import Comparison, LabError, NextByte, TrainConfig, compare_mixers, load_text
from seqzoo.lab.charts import Axis, Bar, Line, bar_chart, line_chart, log_ticks, round_ticks, with_sd
from seqzoo.lab.page import number, page, size
from seqzoo.lab.report import read_folder, sections, write_report
from seqzoo.lab.tasks import create_task

VOID = {"meta"}


@pytest.fixture(scope="module")
def text_task(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "<text>.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return NextByte(load_text(path, 16), 16, valid_windows=4)


def run(task, out, mixers=("gla", "lru+attention"), seeds=(0, 1), contexts=(4, 16), lr=4e-3):
    training = TrainConfig(steps=3, batch_size=2, evaluations=2, lr=lr)
    comparison = Comparison(mixers=mixers, dim=16, depth=2, seeds=seeds, contexts=contexts, training=training)
    return list(compare_mixers(comparison, task, out=out))


@pytest.fixture(scope="module")
def folder(text_task, tmp_path_factory):
    """A finished comparison, and its results."""
    out = tmp_path_factory.mktemp("report") / "run"
    return out, run(text_task, out)


class Page(HTMLParser):
    """Checks that tags close, and keeps the text and what is linked to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open, self.links, self.text, self.tags = [], [], [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [v for k, v in attributes if k in ("src", "href", "srcset", "action", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)  # of SVG, closed at once

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)


# ---- reading and merging


def test_figures_are_those_of_the_results(folder):
    path, results = folder
    (section,) = sections([read_folder(path)])
    assert [group.label for group in section.groups] == ["gla", "lru+attention"]
    values = [result.metric for result in results if result.mixer == "gla"]
    mean, sd = section.groups[0].spread("metric")
    assert mean == pytest.approx(sum(values) / 2)
    assert sd == pytest.approx(abs(values[0] - values[1]) / math.sqrt(2))
    curve = section.groups[0].against("tokens")
    assert [tokens for tokens, _ in curve] == [2 * 2 * 16, 3 * 2 * 16]
    assert curve[-1][1].mean == pytest.approx(mean)
    states = section.groups[1].at_contexts("state_bytes")
    assert [context for context, _ in states] == [4, 16]
    assert states[1][1].mean > states[0][1].mean  # attention's state grows
    assert states[0][1].sd == 0


def test_other_seeds_of_the_same_setting_join(folder, text_task, tmp_path):
    run(text_task, tmp_path / "more", mixers=("gla",), seeds=(2,))
    (section,) = sections([read_folder(folder[0]), read_folder(tmp_path / "more")])
    assert [(group.label, len(group.results)) for group in section.groups] == [
        ("gla", 3),
        ("lru+attention", 2),
    ]
    assert len(section.groups[0].curves) == 3


def test_other_settings_and_seeds_run_twice_stay_apart(folder, text_task, tmp_path):
    run(text_task, tmp_path / "again", mixers=("gla",), seeds=(1,))
    run(text_task, tmp_path / "slow", mixers=("gla",), seeds=(7,), lr=1e-4)
    for name in ("again", "slow"):
        (section,) = sections([read_folder(folder[0]), read_folder(tmp_path / name)])
        labels = [group.label for group in section.groups]
        assert labels == ["gla (run)", f"gla ({name})", "lru+attention"]


def test_folders_of_one_name_go_by_their_paths(folder, text_task, tmp_path):
    run(text_task, tmp_path / "run", mixers=("gla",), seeds=(0,))
    (section,) = sections([read_folder(folder[0]), read_folder(tmp_path / "run")])
    assert section.groups[1].label == f"gla ({tmp_path / 'run'})"


def test_a_folder_named_twice_counts_once(folder):
    (section,) = sections([read_folder(folder[0]), read_folder(folder[0] / ".." / "run")])
    assert len(section.groups) == 2


def test_each_task_has_its_section(folder, tmp_path):
    task = create_task("digits", bidirectional=True, valid_examples=5)
    run(task, tmp_path / "digits", mixers=("gla",))
    html = page(sections([read_folder(folder[0]), read_folder(tmp_path / "digits")]))
    text = "".join(Page(html).text)
    assert text.index("Each next byte of") < text.index("Task: digits")
    assert "accuracy against training tokens" in text.lower()


def test_a_run_that_was_killed_shows_what_was_finished(folder, tmp_path):
    lines = (folder[0] / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "config.json").write_text((folder[0] / "config.json").read_text())
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:6]) + lines[6][:20])
    found = read_folder(tmp_path)
    assert list(found.results) == [("gla", 0)]
    write_report([tmp_path], tmp_path / "report.html")
    assert "lru+attention (" not in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"has no config\.json and metrics\.jsonl"),
        ({"config.json": "{}", "metrics.jsonl": ""}, "was not written by"),
        ({"config.json": "{", "metrics.jsonl": ""}, "was not written by"),
        ({"config.json": "[]", "metrics.jsonl": ""}, "was not written by"),
        ({"metrics.jsonl": "1\n"}, "was not written by"),
        ({"metrics.jsonl": ""}, "holds no finished run"),
    ],
)
def test_what_is_no_comparison_is_a_line(folder, tmp_path, files, message):
    if files and "config.json" not in files:
        files = {"config.json": (folder[0] / "config.json").read_text(), **files}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(LabError, match=message) as caught:
        write_report([tmp_path], tmp_path / "report.html")
    assert str(tmp_path) in str(caught.value)
    assert not (tmp_path / "report.html").exists()


# ---- the page


def test_the_page_stands_alone_and_shows_every_part(folder, tmp_path):
    write_report([folder[0]], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    found = Page(html)
    assert found.links == []
    assert not re.search(r"https?://|url\(|@import|<script", html)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in html
    assert "prefers-color-scheme: dark" in html
    text = "".join(found.text)
    for part in (
        "Bits per byte against training tokens",
        "Bits per byte against training time",
        "Training speed",
        "Decoding speed",
        "State size against context",
        "Training memory against context",
        "Decoding speed against context",
        "unigram entropy",
        "weight decay",
        "torch",
        "platform",
        "seeds (0, 1)",
        "Models, as JSON",
    ):
        assert part in text
    assert found.tags.count("svg") == 7
    assert html.count('class="band') == 2 * 5  # two mixers, a band in each chart of lines
    result = folder[1][0]
    assert f"{result.parameters / 1000:.3g}k" in text
    assert "±" in text


def test_names_of_users_are_escaped(folder):
    html = page(sections([read_folder(folder[0])]))
    assert "<text>.txt" not in html
    assert "&lt;text&gt;.txt" in html


def test_one_seed_has_no_band_and_no_deviation(text_task, tmp_path):
    run(text_task, tmp_path, mixers=("gla",), seeds=(3,), contexts=())
    html = page(sections([read_folder(tmp_path)]))
    assert "band c" not in html and "nan" not in html.lower().replace("nano", "")
    body = re.search(r"<tbody>(.*?)</tbody>", html)[1]
    assert "±" not in body
    assert html.count("<svg") == 4


# ---- charts


def test_a_line_chart_is_xml_and_stays_inside():
    line = Line("a & b", 0, [1, 10, 100], [0.5, 2.0, 1.0], [0.1, 5.0, 0.0])
    for log in (False, True):
        root = ET.fromstring(
            line_chart([line], Axis("x", number, log=log), Axis("y", number, log=log), ("level", 3.0))
        )
        _, _, width, height = map(float, root.get("viewBox").split())
        for path in root.iter("path"):
            assert "nan" not in path.get("d")
        for dot in root.iter("circle"):
            assert 0 <= float(dot.get("cx")) <= width and 0 <= float(dot.get("cy")) <= height
        heights = [float(dot.get("cy")) for dot in root.iter("circle")]
        assert heights[0] > heights[2] > heights[1]


def test_charts_take_one_point_equal_values_and_zero():
    nan = float("nan")
    ET.fromstring(line_chart([Line("a", 0, [5], [1.0], [nan])], Axis("x", number), Axis("y", number)))
    ET.fromstring(
        line_chart([Line("a", 0, [5, 6], [0.0, 0.0], [0.0, 0.0])], Axis("x", number), Axis("y", number))
    )
    ET.fromstring(
        line_chart(
            [Line("a", 0, [4, 4], [8, 8], [0, 0])], Axis("x", number, log=True), Axis("y", number, log=True)
        )
    )
    ET.fromstring(bar_chart([Bar("a", 0, 0.0, nan), Bar("b", 1, 0.0, 0.0)], "name", number))


def test_bars_are_as_long_as_their_values():
    root = ET.fromstring(bar_chart([Bar("a", 0, 10.0, float("nan")), Bar("b", 9, 5.0, 1.0)], "name", number))
    first, second = (float(bar.get("width")) for bar in root.iter("rect"))
    assert first == pytest.approx(2 * second)
    assert "5.00 ± 1.00" in "".join(root.itertext())


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2.31, 5.2), (0, 307_200), (-3, 3), (1e-9, 2e-9)])
def test_round_ticks(low, high):
    ticks = round_ticks(low, high)
    assert 2 <= len(ticks) <= 8
    assert all(low <= tick <= high for tick in ticks)
    assert len({round(b - a, 12) for a, b in zip(ticks, ticks[1:], strict=False)}) == 1


@pytest.mark.parametrize(("low", "high"), [(1, 1e6), (64, 4096), (1, 1e12), (3, 3.9)])
def test_log_ticks(low, high):
    ticks = log_ticks(low, high)
    assert len(ticks) <= 7
    assert all(low <= tick <= high for tick in ticks)


def test_figures_read_well():
    assert [number(v) for v in (0, 0.1234, 12.34, 999.7, 1234, 2.5e6)] == [
        "0",
        "0.123",
        "12.3",
        "1k",
        "1.23k",
        "2.5M",
    ]
    assert [size(v) for v in (0, 512, 2048, 3 * 2**20, 2**42)] == [
        "0 B",
        "512 B",
        "2 KiB",
        "3 MiB",
        "4096 GiB",
    ]
    assert with_sd(43_800, 207, number) == "43.8k ± 0.2k"
    assert with_sd(10_020, 4_200, number) == "10.0k ± 4.2k"
    assert with_sd(638.4, 26.52, number) == "638 ± 27"
    assert with_sd(0.0, 0.0, number) == "0 ± 0"
    assert with_sd(1.0, float("nan"), number) == "1"


def test_results_hold_what_each_context_costs(folder):
    lines = (folder[0] / "metrics.jsonl").read_text().splitlines()
    results = [event for event in map(json.loads, lines) if event["event"] == "result"]
    for result in results:
        small, large = result["contexts"]
        assert (small["context"], large["context"]) == (4, 16)
        assert small["training_bytes"] < large["training_bytes"]
        assert small["decode_tokens_per_second"] > 0
