"""report.html: offline, escaped, the same bytes for the same verdict, and it says what the verdict says."""

from __future__ import annotations

import functools
import json
import re
from html.parser import HTMLParser

import pytest
import report_samples as samples

from day0check.gate import render
from day0check.report import html
from day0check.report.charts import drift_chart

VERDICTS = {"ready": samples.ready, "not_ready": samples.not_ready, "hostile": samples.hostile}
OWN_TAGS = (
    "html head meta title link style body header p span dl div dt dd nav a main section h2 h3 table thead tr th td "
    "tbody details summary pre footer script svg g path defs clippath rect text tspan use"
)
VOID = {"meta", "link", "path", "rect", "use"}


class Reader(HTMLParser):
    """Collects tags, attributes, the text outside style and script, and checks that elements nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self._open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@functools.cache
def page(name: str) -> str:
    return make(name)


def make(name: str) -> str:
    verdict = VERDICTS[name]()
    return html.page(verdict, raw=render(verdict))


@pytest.mark.parametrize("name", VERDICTS)
def test_nothing_is_fetched_and_nothing_but_ours_is_markup(name: str) -> None:
    """Would catch a resource from outside, an unescaped text of a run, and a script that a run smuggles in."""
    reader = Reader(page(name))
    known = set(OWN_TAGS.split())
    assert {tag for tag, _ in reader.tags} <= known
    assert sum(tag == "script" for tag, _ in reader.tags) == 1
    for tag, attributes in reader.tags:
        assert not [a for a in attributes if a.startswith("on") or a == "src"], (tag, attributes)
        for name_ in ("href", "xlink:href"):
            if name_ in attributes:
                assert attributes[name_].startswith(("#", "data:,")), (tag, attributes)
    outside_svg = re.sub(r"<svg.*?</svg>", "", page(name), flags=re.S)
    assert not re.findall(r"url\(|@import", outside_svg.split("</style>")[0])


def test_hostile_text_is_shown_as_text() -> None:
    """Would catch a text that is dropped instead of shown; the template engine must not see it as a template."""
    text = Reader(page("hostile")).text
    assert "<script>alert(1)</script>" in text
    assert "{{ 7*7 }}" in text
    assert " 49 " not in text


def test_the_policy_of_the_page_forbids_every_request() -> None:
    """Would catch a page that could call home if an escape were ever missed."""
    metas = [a for tag, a in Reader(page("ready")).tags if tag == "meta"]
    assert any("default-src 'none'" in a.get("content", "") for a in metas)


def test_the_page_says_what_the_verdict_says() -> None:
    """Would catch a banner, sentence, table or reason that is missing, and failures below what passed."""
    text = Reader(page("not_ready")).text
    assert "✗ NOT READY First fault: dsa.select in layer 3 (prefill): selects the future" in text
    assert "dsa.select · layer 3 · prefill · text/one_turn/a#1 · position 83" in text
    assert "waived blocker a known one" in text
    assert "the reference pass of this case was not run" in text
    assert "torch: 2.12.0 -> 2.13.0" in text
    assert "1.31" in text
    assert "residual + norm (1,312 calls), index score + block maxima (1 call)" in text
    assert text.index("2 of 40 judgements failed") < text.index("412 of 412 judgements passed")
    assert "✓ READY 8 checks in 2 cases ran and passed." in Reader(page("ready")).text


def test_the_raw_data_are_the_verdict() -> None:
    """Would catch an escape that changes the data that other tools read out of the page."""

    class Raw(Reader):
        raw = ""

        def handle_data(self, data):
            super().handle_data(data)
            if self._open[-1:] == ["pre"] and self.tags[-1] == ("pre", {"id": "verdict"}):
                self.raw += data

    for name, verdict in VERDICTS.items():
        assert json.loads(Raw(page(name)).raw) == json.loads(render(verdict()))


def test_the_same_verdict_gives_the_same_bytes() -> None:
    """Would catch a date, a random id or an unordered set in the page."""
    assert page("not_ready") == make("not_ready")


def test_ids_are_unique_over_all_charts() -> None:
    """Would catch two charts of one page that share clip paths, so that one hides the other's lines."""
    ids = [a["id"] for _, a in Reader(page("not_ready")).tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert len(ids) > 20


def test_the_chart_marks_what_is_beyond_its_limit() -> None:
    """Would catch a drift curve that looks the same for a healthy and a broken run."""
    healthy, broken = (drift_chart("c", samples.drift("c", bad=bad)) for bad in (None, 3))
    assert "beyond its limit" in broken
    assert "beyond its limit" not in healthy
    assert drift_chart("c", ()) == ""


def test_a_chart_of_zero_and_of_no_noise() -> None:
    """Would catch a logarithmic axis that a perfect or an unmeasured layer breaks."""
    rows = [{**row, "relative_l2": 0.0, "noise_relative_l2": None} for row in samples.drift("c")]
    assert drift_chart("c", rows).startswith("<svg")
