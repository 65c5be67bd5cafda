"""Joining measures into findings, and which of them is named first."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from day0check.compare.locate import findings_from, first_fault, split_tap
from day0check.types import Finding, Measure
from reference.config import ModelConfig, Moe

CONFIG = ModelConfig(
    name="x",
    hidden=8,
    layers=("kda", "dsa", "kda", "dsa"),
    vocab=8,
    max_positions=64,
    mlp_width=8,
    moe=Moe(4, 2, 8, 8, first_dense=1),
)


def measure(tap: str, order: int, *, passed: bool = False, phase: str = "prefill", pattern: str = "one row") -> Measure:
    operator = split_tap(tap)[1]
    layer = int(tap.split(".")[1]) if tap.startswith("layers.") else None
    return Measure(
        tap=tap,
        operator=operator,
        kind="compute",
        phase=phase,
        layer=layer,
        order=order,
        rows=4,
        elements=32,
        passed=passed,
        statistics={"row": 0.9 if passed else 12.0, "whole": 0.7},
        limits={"row": 1.5, "whole": 1.1},
        failing="" if passed else "row",
        request=None if passed else "text/x/a#1",
        position=None if passed else 83,
        pattern="" if passed else pattern,
    )


def test_one_finding_per_operator_layer_class_phase_and_pattern():
    """Would catch a finding per tap, a finding that mixes classes, and an address that is not the earliest."""
    measures = [
        measure("layers.03.dsa.attention", 90),
        measure("layers.01.dsa.attention", 30),
        measure("layers.01.dsa.attention", 200, phase="decode"),
        measure("layers.01.dsa.attention", 30, pattern="nan"),
        measure("layers.00.norm.rms.input", 2),
        measure("layers.02.norm.rms.input", 60),
        measure("layers.01.dsa.score", 28, passed=True),
        measure("layers.01.dsa.select", 29, passed=True),
    ]
    found = findings_from("compute", measures, CONFIG)
    assert [(f.operator, f.layer, f.phase, f.evidence["pattern"], f.evidence["layers"]) for f in found] in (
        [
            ("norm.rms", 0, "prefill", "one row", [0]),
            ("dsa.attention", 1, "prefill", *second),
            ("dsa.attention", 1, "prefill", *third),
            ("norm.rms", 2, "prefill", "one row", [2]),
            ("dsa.attention", 1, "decode", "one row", [1]),
        ]
        for second, third in itertools.permutations([("one row", [1, 3]), ("nan", [1])])
    )
    joined = next(f for f in found if f.evidence["tap_count"] == 2)
    assert (joined.value, joined.limit, joined.position) == (12.0, 1.5, 83)
    assert joined.message.startswith("dsa.attention in layer 1 (prefill), request text/x/a#1, position 83: one row")
    assert [r["tap"] for r in joined.evidence["ruled_out"]] == ["layers.01.dsa.select", "layers.01.dsa.score"]
    assert joined.evidence["ruled_out"][0]["value"] == 0.7
    assert len({f.id for f in found}) == len(found)


def test_order_of_lines_and_numbers_do_not_matter():
    """Would catch identities or addresses that change between two runs of the same thing."""
    measures = [measure(f"layers.{layer:02d}.norm.rms.input", 10 * layer) for layer in range(4)]
    first = findings_from("compute", measures, CONFIG)
    shuffled = list(measures)
    random.Random(3).shuffle(shuffled)
    assert findings_from("compute", shuffled, CONFIG) == first
    other = [dataclasses.replace(m, statistics={"row": 40.0, "whole": 0.7}) for m in measures]
    assert [f.id for f in findings_from("compute", other, CONFIG)] == [f.id for f in first]


@pytest.mark.parametrize(
    ("values", "told"), [((2, 5, 9, 30), True), ((30, 9, 5, 2), False), ((2, 30, 5, 9), False), ((2, 2, 3, 3), False)]
)
def test_growth_with_depth_is_told(values, told):
    """Catches an error that grows from layer to layer and is told like one that does not; the id stays as it is."""
    measures = [
        dataclasses.replace(measure(f"layers.{n:02d}.norm.rms.input", n), statistics={"row": float(v)})
        for n, v in enumerate(values)
    ]
    config = dataclasses.replace(CONFIG, layers=("kda",) * 4, moe=None)
    (found,) = findings_from("compute", measures, config)
    assert ("growing with the depth" in found.message) == told
    assert found.message.endswith("layers 0 to 3") == told
    assert found.evidence["pattern"] == "one row"


def test_unjudged_and_passing_measures_are_no_findings():
    """Would catch a tap that could not be judged being called wrong."""
    unjudged = dataclasses.replace(measure("layers.00.norm.rms.input", 1), not_judged="no contract", failing="")
    assert findings_from("compute", [unjudged, measure("layers.01.dsa.score", 2, passed=True)], CONFIG) == ()


def finding(check: str, order: float | None, *, severity: str = "blocker", waived: bool = False) -> Finding:
    evidence = {} if order is None else {"order": order}
    return Finding(f"{check}{order}", severity, check, "norm.rms", "m", waived=waived, evidence=evidence)


@pytest.mark.parametrize(
    ("findings", "first"),
    [
        ([("propagated", 3), ("compute", 90), ("candidate", None)], ("compute", 90)),
        ([("propagated", 3), ("candidate", None)], ("candidate", None)),
        ([("logits", 300), ("propagated", 3)], ("propagated", 3)),
        ([("compute", 40), ("choose", 20), ("exact", 30)], ("choose", 20)),
        ([("compute", 20), ("move", 20), ("exact", 20)], ("exact", 20)),
        ([("baseline.speed", None), ("logits", 8)], ("baseline.speed", None)),
    ],
)
def test_order_of_accusation(findings, first):
    """Would catch the net accusing a neighbour while local replay knows the operator."""
    made = [finding(check, order) for check, order in findings]
    found = first_fault(made)
    assert (found.check, found.evidence.get("order")) == first


def test_waived_findings_and_warnings_are_not_first():
    """Would catch a known finding that hides a new one."""
    waived = finding("exact", 1, waived=True)
    note = finding("move", 2, severity="warning")
    assert first_fault([waived, note]) is None
    assert first_fault([waived, note, finding("compute", 9)]).check == "compute"


@pytest.mark.parametrize(
    ("tap", "expected"),
    [
        ("layers.03.dsa.select", ("layers.03", "dsa.select")),
        ("vision.blocks.01.vision.rope.query", ("vision.blocks.01", "vision.rope")),
        ("vision.vision.patch", ("vision", "vision.patch")),
        ("vision.norm.rms.vision_final", ("vision", "norm.rms")),
        ("head.logits", ("", "head.logits")),
        ("who.knows", ("who.knows", None)),
    ],
)
def test_tap_is_split_by_the_contracts(tap, expected):
    """Would catch a dead candidate whose last operator is read wrongly from the heartbeat."""
    assert split_tap(tap) == expected


def parameter_error(tap: str, order: int, *, spreads: float, error: float, passed: bool) -> Measure:
    made = measure(tap, order, passed=passed, phase="decode", pattern="everywhere")
    statistics = {"whole": 2.5, "direction_scale": spreads, "error_scale": error}
    return dataclasses.replace(made, statistics=statistics, failing="" if passed else "whole")


def test_a_layer_too_small_to_tell_is_named_where_later_ones_prove_its_error():
    """Would catch a fault of all layers that is placed at the first layer with enough rows to tell; and a healthy layer
    that is accused because another one is wrong."""
    taps = (("layers.01.dsa.attention", 91), ("layers.03.dsa.attention", 93))
    later = [parameter_error(tap, order, spreads=18, error=0.01, passed=False) for tap, order in taps]
    config = dataclasses.replace(CONFIG, layers=("dsa",) * 4, moe=None)

    def placed(before: Measure, others: list[Measure] = later):
        return findings_from("compute", [*others, before], config)[0]

    same = parameter_error("layers.00.dsa.attention", 40, spreads=13, error=0.009, passed=True)
    found = placed(same)
    assert (found.layer, found.evidence["order"], found.request) == (0, 40, None)
    assert found.evidence["taps"][:2] == ["layers.00.dsa.attention", "layers.01.dsa.attention"]
    assert "layer 1 (decode)" in found.message
    assert (found.value, found.limit) == (2.5, 1.1)
    assert placed(dataclasses.replace(same, statistics={**same.statistics, "direction_scale": 3.0})).layer == 1
    assert placed(dataclasses.replace(same, statistics={**same.statistics, "error_scale": 0.002})).layer == 1
    assert placed(dataclasses.replace(same, phase="prefill")).layer == 1
    assert placed(same, later[:1]).layer == 1  # one layer alone proves nothing about another
