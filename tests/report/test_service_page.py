"""Guards what the page says of a service: its load, its start, and requests beside each other."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from day0check.gate import read_verdict, render, write_verdict
from day0check.load.metrics import Timing, summary
from day0check.load.records import Reply
from day0check.load.traffic import Load, OwnCost
from day0check.report.html import page
from day0check.report.rows import measured_pairs
from day0check.report.service import services
from day0check.types import CheckOutcome, Verdict

SECOND = 1_000_000_000


def figures(count: int, *, ttft: float, failed: int = 0) -> dict:
    """One phase of `count` requests of a second each, one after the other half a second later."""
    replies, samples = [], []
    for number in range(count):
        begin = number * SECOND // 2
        reads = tuple((begin + SECOND // 4 * k, b"x") for k in range(1, 4))
        replies.append(Reply(200, begin, begin, begin + SECOND, reads, streamed=True))
        ok = number >= failed
        samples.append(
            Timing(ok, ttft + number, ttft, None, 1000.0, (250.0,), 9.5, 10.5, 12, 8, "" if ok else "dropped")
        )
    load = Load(tuple(replies), 0, (count + 1) * SECOND // 2, OwnCost((0.5, 1.0), (0.0,), 0.1, 0.02))
    return summary(samples, load, slos={"ttft_ms": 1000.0})


def verdict(**changed) -> Verdict:
    row = {"label": "together/0/1", "same_text": False, "token": 3, "margin": 0.02, "delta_logprob": 0.01}
    row |= {"repeat_same_text": True, "repeat_delta_logprob": 0.0}
    paths = [{"path": "warm prefix", "exercised": True, "proof": "64 tokens"}, {"path": "preemption", "proof": "none"}]
    measured = {
        "load": {
            "warmup": figures(2, ttft=9),
            "closed/1": figures(4, ttft=20),
            "closed/4": figures(8, ttft=60, failed=1),
        },
        "requests": 97,
        "most_in_flight": 8,
        "counters": [
            {"moment": "before_cancel", "values": {"running": 0.0}},
            {"moment": "after_<cancel>", "values": {"running": 0.0}},
            {"moment": "unknown", "values": {}},
        ],
        "interference": [row],
        "exercised": paths,
    } | changed
    return Verdict("ready", {"name": "m"}, "bf16", ("endpoint",), measured={"endpoint": measured, "seconds": 3.0})


def test_the_page_draws_and_tabulates_a_load() -> None:
    """Would catch a load that is measured and shown nowhere, a failure without its colour, and unescaped text."""
    made = verdict()
    text = page(made, raw=render(made))
    assert text == page(made, raw=render(made))
    assert text.count('<svg role="img"') == 3
    for title in ("Latency distributions", "Throughput against latency", "Timeline", "Beside others against alone"):
        assert title in text
    assert 'href="#services"' in text
    assert "after_<cancel>" not in text.split('id="raw"')[0]
    (service,) = services(made)
    (load,) = [t for t in service.tables if t.title.startswith("Load")]
    assert [line.cells[0] for line in load.rows] == ["warmup", "closed/1", "closed/4"]
    assert [line.state for line in load.rows] == ["", "", "failed"]
    assert len({len(line.cells) for line in load.rows} | {len(load.head)}) == 1
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_a_page_that_is_made_again_has_the_order_in_which_it_was_asked(tmp_path: Path) -> None:
    """Would catch a page made from verdict.json, whose keys are sorted, with phases and moments in another order."""
    phases = ("warmup", "closed/1", "closed/2", "closed/16", "open/poisson")
    made = verdict(load={name: figures(4, ttft=20) for name in phases})
    write_verdict(made, tmp_path / "verdict.json")
    (service,) = services(read_verdict(tmp_path / "verdict.json"))
    for title in ("Latency distributions", "Timeline"):
        assert re.findall(r">\s*((?:closed|open)/\w+)\s*<", dict(service.charts)[title]) == list(phases[1:])
    rows = {t.title: [line.cells[0] for line in t.rows] for t in service.tables}
    assert rows["Load: medians where nothing else is said"] == list(phases)
    assert rows["Its own counters"] == ["before_cancel", "after_<cancel>"]


def test_the_checks_of_one_case_are_not_cut_off() -> None:
    """Would catch a table of a single row that is wider than the page."""
    answers = tuple(CheckOutcome(f"endpoint.<{i}>", "passed", "endpoint", f"summary {i}") for i in range(12))
    alone = replace(verdict(), checks=answers)
    text = page(alone, raw="").split('id="checks"')[1].split('id="not-run"')[0]
    assert 'class="matrix"' not in text
    assert [f"endpoint.&lt;{i}&gt;" in text and f'title="summary {i}"' in text for i in range(12)] == [True] * 12
    other = replace(answers[0], case="other")
    assert 'class="matrix"' in page(replace(alone, checks=(*answers, other)), raw="")


def test_a_service_without_a_load_has_its_start() -> None:
    """Would catch a page that needs a load, and one that hides how long the start took."""
    start = {"listening": 2.5, "ready": 4.0, "stopping": 1.0, "steps": {"load weights": 1.25}}
    made = Verdict("ready", {}, "bf16", (), measured={"service": {"service/embedded": {"start": start, "requests": 1}}})
    (service,) = services(made)
    assert service.charts == ()
    assert ("step: load weights", "1.25") in [line.cells for table in service.tables for line in table.rows]
    assert "service/embedded" in page(made, raw="{}")
    assert measured_pairs(made) == []
    assert services(Verdict("ready", {}, "bf16", ())) == ()


def test_the_timeline_adds_up() -> None:
    """Would catch tokens or requests that are lost between the steps of the timeline."""
    row = figures(4, ttft=20)
    line, seconds = row["timeline"], row["seconds"]
    assert abs(sum(line["output_tokens_per_s"]) * line["step_s"] - 4 * 8) < 1e-6
    assert abs(sum(line["in_flight"]) * line["step_s"] - 4.0) < 1e-6
    assert abs(line["step_s"] * len(line["in_flight"]) - seconds) < 1e-9
    assert row["curves"]["ttft_ms"][0] == 20
    assert row["curves"]["ttft_ms"][-1] == 23


def test_what_was_exercised_and_what_the_client_cost_are_shown() -> None:
    """Would catch a path without proof that looks taken, and a slow client that hides behind the endpoint's figures."""
    slow = figures(4, ttft=20) | {"client_bound": "the client itself read up to 9.0 ms late (p90)"}
    quick = figures(4, ttft=20) | {"client_bound": "", "saturated": True}
    (service,) = services(verdict(load={"closed/1": quick, "closed/2": slow}))
    by_title = {t.title: t for t in service.tables}
    assert [(r.cells[0], r.state) for r in by_title["What was exercised"].rows] == [
        ("exercised", "passed"),
        ("not exercised", "not_run"),
    ]
    client = by_title["The client that measured"]
    assert [row.state for row in client.rows] == ["", "not_run"]
    assert "9.0 ms late" in client.rows[1].cells[-1]
    assert [row.cells[-1] for row in by_title["Load: medians where nothing else is said"].rows] == [
        "saturated",
        "client too slow",
    ]
    counters = verdict(counters=[{"moment": "before", "values": {"prefix_hits": 10500.0, "kv_usage": 0.125}}])
    (table,) = [t for t in services(counters)[0].tables if t.title == "Its own counters"]
    assert table.rows[0].cells == ("before", "0.125", "10,500")
