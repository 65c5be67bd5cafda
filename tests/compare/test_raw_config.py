"""Guards the reading of config.json that reference and candidate share: a table of its own says what each key means."""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest

from day0check.compare.checkpoint_parameters import Source, compare_with
from day0check.compare.parameters import Recorded
from day0check.compare.raw_config import RULES, beside, compare_raw
from reference.presets import preset_dir
from reference.weights import Checkpoint

PRESETS = ("tiny", "tiny-deepseek-v3.2", "tiny-glm-5", "tiny-kimi-linear", "tiny-glm-5.3", "tiny-kimi-k2.5")


@functools.cache
def source(name: str) -> Source:
    return Source(Checkpoint(preset_dir(name)))


def raw(name: str) -> dict:
    return json.loads((preset_dir(name) / "config.json").read_text())


def recorded(name: str) -> list[Recorded]:
    return [dataclasses.replace(r, phase="prefill") for r in source(name).truth({"text"}).values()]


@pytest.mark.parametrize("name", PRESETS)
def test_the_reference_reads_every_release_as_the_table_does(name):
    """Catches a false alarm over any family, and a table that says nothing about one."""
    found = compare_raw(raw(name), recorded(name))
    assert [m.message for m in found if not m.passed] == []
    assert {"norm.rms", "moe.route", "moe.scores", "embed.tokens"} <= {m.operator for m in found}


def test_every_rule_is_about_some_preset_and_each_is_seen_to_bite():
    """Catches a rule whose key or argument is spelled in a way that never meets anything."""
    bitten = set()
    for name in PRESETS:
        config, every = raw(name), recorded(name)
        text = config.get("text_config", config)
        for rule in RULES:
            for key in rule.keys:
                head, _, tail = key.partition(".")
                inside = text.get(head)
                value = inside.get(tail) if tail and isinstance(inside, dict) else None if tail else inside
                if value is None:
                    continue
                other = "softmax" if isinstance(value, str) else not value if isinstance(value, bool) else value * 3
                changed = text | {head: inside | {tail: other} if tail else other}
                wrong = [m for m in compare_raw(config | {"text_config": changed}, every) if not m.passed]
                if any(m.operator == rule.operator and rule.argument in m.pattern for m in wrong):
                    bitten.add((rule.operator, rule.argument, rule.axis))
    assert {(r.operator, r.argument, r.axis) for r in RULES} - bitten <= {("moe.route", "kept_groups", None)}


def test_a_reader_that_both_sides_share_is_not_believed():
    """Catches a theta that reference and candidate read alike and wrongly: one against the other agrees."""
    every = recorded("tiny")
    misread = [
        dataclasses.replace(r, settings=r.settings | {"theta": 5e5}) if r.operator == "rope.apply" else r for r in every
    ]
    shared = Source(source("tiny").checkpoint)
    shared._passes["text"] = {r.tap: r for r in misread}
    agreed = compare_with(shared, "bf16", misread)
    assert [m for m in agreed if not m.passed] == []
    told = [m for m in beside(agreed, compare_raw(raw("tiny"), misread)) if not m.passed]
    assert {(m.operator, m.pattern) for m in told} == {("rope.apply", "not as configured: theta")}
    assert "theta is 500000.0, rope_theta of config.json 10000.0" in told[0].message


def test_one_wrong_setting_is_one_finding():
    """Catches a candidate that misreads by itself and is told twice."""
    misread = [
        dataclasses.replace(r, settings=r.settings | {"theta": 5e5}) if r.operator == "rope.apply" else r
        for r in recorded("tiny")
    ]
    compared = compare_with(source("tiny"), "bf16", misread)
    both = beside(compared, compare_raw(raw("tiny"), misread))
    assert {m.pattern for m in both if not m.passed} == {"other setting: theta"}
