"""The laws of the cost check on made-up sweeps: what each of them sees, and what is no fault."""

import dataclasses

import pytest

from day0check.compare.cost import CostLine, Costs, judge_costs, read_costs, write_costs
from day0check.errors import InputError

SIZES = (32, 45, 64, 91, 128, 181, 256, 362, 512, 724, 1024, 1448, 2048)
MB = 1e6


def line(size: int, **changes) -> CostLine:
    """A healthy line: three bytes of traffic for each of the model's, and a quarter of the roof."""
    bytes_ = float(size * 40000)
    healthy = CostLine(
        tap="layers.05.mla.attention",
        operator="mla.attention",
        layer=5,
        phase="prefill",
        sweep="length",
        size=size,
        order=7,
        calls=1,
        operations=0.0,
        bytes=bytes_,
        done=0.0,
        moved=3 * bytes_ + 1e5,
        scratch=min(bytes_, 40 * MB),
        kept=0.0,
        seconds=1e-3 + bytes_ / 2.5e9,
    )
    return dataclasses.replace(healthy, **changes)


def judged(lines) -> dict:
    measures = judge_costs(Costs(tuple(lines), roof_bytes_per_second=1e10))
    assert len({(m.tap, m.phase) for m in measures}) == len(measures)
    return {m.tap: m for m in measures}


def only(lines):
    (measure,) = judged(lines).values()
    return measure


def test_blocks_and_constant_costs_are_no_fault():
    """Catches a law that takes a fixed block, a start-up cost or a constant factor for growth."""
    measure = only(line(n) for n in SIZES)
    assert measure.passed, measure.message
    assert set(measure.limits) == {f"{law}_length" for law in ("kept", "layers", "scratch", "time", "step", "order")}


@pytest.mark.parametrize(
    ("law", "changed"),
    [
        ("kept", lambda n, healthy: {"kept": 4.0 * n * n}),
        ("scratch", lambda n, healthy: {"scratch": 16.0 * 8 * n * n}),
        ("step", lambda n, healthy: {"moved": healthy.moved * (2 if n >= 256 else 1)}),
        ("order", lambda n, healthy: {"moved": 3.0 * n * 40000 * n / 32}),
        ("time", lambda n, healthy: {"seconds": healthy.seconds + 5e-3 * n}),
    ],
)
def test_each_law_sees_its_own_fault(law, changed):
    """Catches a law that sees nothing, or accuses another of what it should see."""
    measure = only(line(n, **changed(n, line(n))) for n in SIZES)
    assert not measure.passed
    assert measure.failing == f"{law}_length"
    assert (measure.layer, measure.phase, measure.order) == (5, "prefill", 7)
    assert measure.pattern
    assert measure.message


def test_what_one_call_keeps_is_a_table_and_no_leak():
    """Catches a table that is made once and taken for a leak."""
    assert only(line(n, kept=5 * MB if n == 32 else 0.0) for n in SIZES).passed


def test_a_layer_that_does_more_than_its_like_is_named():
    """Catches a slow path that one layer alone takes."""
    layers = [
        line(
            n,
            tap=f"layers.{i:02d}.kda.attention",
            operator="kda.attention",
            layer=i,
            moved=n * 1e5 * (2 if i == 4 else 1),
        )
        for n in SIZES
        for i in range(6)
    ]
    found = judged(layers)
    assert {tap for tap, m in found.items() if not m.passed} == {"layers.04.kda.attention"}
    assert found["layers.04.kda.attention"].failing == "layers_length"


def test_a_cost_that_grows_where_the_model_does_not_is_seen():
    """Catches a decode step that writes the whole index again: its model is one key, whatever the context."""
    flat = {"bytes": 256.0, "phase": "decode", "scratch": 0.0, "seconds": 1e-4}
    assert only(line(n, moved=800.0, **flat) for n in SIZES).passed
    assert only(line(n, moved=64.0 * n, **flat) for n in SIZES).failing == "order_length"


def test_a_record_is_read_as_it_was_written_or_refused(tmp_path):
    """Catches a sweep that is lost on its way, and a damaged one that counts as none."""
    costs = Costs(tuple(line(n) for n in SIZES), 2e10)
    assert read_costs(tmp_path) is None
    write_costs(tmp_path, costs)
    assert read_costs(tmp_path) == costs
    (tmp_path / "costs.jsonl").write_text('{"roof_bytes_per_second": 1}\n{"tap": 3}\n')
    with pytest.raises(InputError):
        read_costs(tmp_path)
