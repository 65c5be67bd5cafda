"""What rounding may do to long prompts: measured beside one neighbour, and at most twice the claimed precision."""

from __future__ import annotations

from dataclasses import replace

import pytest

from day0check.checks.endpoint import interference
from day0check.checks.endpoint.compare import Difference
from day0check.checks.endpoint.interference import BESIDE, SURGE, Row, _changed
from day0check.compare.wire import Followed
from day0check.load.observed import Observed

EQUAL = Difference(None, None, 0.0, None)


def moved(delta: float) -> Difference:
    """The same text, its log-probabilities moved."""
    return Difference(None, None, delta, None)


def parted(margin: float, delta: float = 0.0) -> Difference:
    return Difference(7, margin, delta, 20)


def table(*beside: Difference, repeat: Difference = EQUAL) -> tuple[Row, ...]:
    return tuple(Row(f"surge/{i}", f"surge/together/0.{i}", repeat, d) for i, d in enumerate(beside))


def found(rows: tuple[Row, ...], way: str = SURGE, profile: str = "bf16") -> list[tuple[str, str]]:
    observed = Observed("m", "chat", ("interference",), profile=profile)
    return [(f.evidence["pattern"], f.severity) for f in _changed(rows, observed, way)]


@pytest.mark.parametrize(
    ("repeat", "beside", "profile", "expected"),
    [
        (EQUAL, (EQUAL, EQUAL), "bf16", []),
        (EQUAL, (parted(0.2), parted(0.1)), "bf16", [("ties, surge", "note")]),
        (EQUAL, (parted(0.3), parted(0.4)), "bf16", [("surge", "blocker")]),
        (EQUAL, (moved(0.6), moved(0.6)), "bf16", [("surge", "blocker")]),
        (EQUAL, (moved(0.02), EQUAL), "fp32", [("surge", "warning")]),
        (EQUAL, (moved(0.03), EQUAL), "fp32", [("surge", "blocker")]),
        (moved(0.2), (parted(0.7), parted(0.7)), "bf16", [("ties, surge", "note")]),
        (moved(0.2), (parted(0.9), parted(0.9)), "bf16", [("surge", "blocker")]),
        (parted(0.8), (parted(0.9), moved(0.7)), "bf16", [("ties, surge", "note")]),
        (parted(9.0, 9.0), (moved(1.1), moved(1.1)), "bf16", [("surge", "blocker")]),
        (parted(9.0, 9.0), (parted(1.1), parted(1.1)), "bf16", [("surge", "blocker")]),
    ],
)
def test_long_prompts_are_judged_in_the_noise_of_one_neighbour(
    repeat: Difference, beside: tuple[Difference, ...], profile: str, expected: list
) -> None:
    """Would catch a false alarm on legal choices that fall otherwise, and a fault of every batch that hides itself."""
    assert found(table(*beside, repeat=repeat), profile=profile) == expected


def test_one_long_prompt_hardly_beyond_is_a_warning() -> None:
    """Would catch a run that fails by the worst of many draws, and one clear fault that is taken for that."""
    assert found(table(parted(0.3), EQUAL, EQUAL)) == [("surge", "warning")]
    assert found(table(parted(0.6), EQUAL, EQUAL)) == [("surge", "blocker")]
    assert found(table(parted(0.3), EQUAL), BESIDE) == [("changed", "blocker")]


@pytest.mark.parametrize(
    ("beside", "profile", "severity"),
    [
        ((moved(0.7), parted(1.1)), "bf16", "warning"),
        ((moved(0.7), parted(1.1), moved(0.6)), "bf16", "blocker"),  # three of eight
        ((moved(2.2),), "bf16", "blocker"),
        ((parted(2.2),), "bf16", "blocker"),
        ((moved(0.02),), "fp32", "blocker"),
    ],
)
def test_a_few_prompts_whose_inner_choices_turn_are_a_warning(beside: tuple, profile: str, severity: str) -> None:
    """Would catch a sound bf16 server that fails by an expert of one token, and a leak that passes for that."""
    rows = table(*beside, *[EQUAL] * (8 - len(beside)))
    assert found(rows, BESIDE, profile) == [("changed", severity)]


@pytest.mark.parametrize(
    ("profile", "wrong", "severity", "decided"),
    [("bf16", 2, "warning", False), ("bf16", 3, "blocker", None), ("fp32", 2, "blocker", None)],
)
def test_a_few_long_prompts_decide_nothing(profile: str, wrong: int, severity: str, decided: bool | None) -> None:
    """Would catch a sound bf16 server that fails by an expert of a few long prompts, and one that passes by it."""
    rows = table(*[moved(0.9)] * wrong, *[EQUAL] * (8 - wrong))
    (finding,) = _changed(rows, Observed("m", "chat", ("interference",), profile=profile), SURGE)
    assert (finding.severity, finding.evidence.get("decided")) == (severity, decided)


@pytest.mark.parametrize(("changed", "status"), [(moved(0.7), "not_run"), (parted(0.1), "passed")])
def test_what_is_no_blocker_is_not_passed_either(changed: Difference, status: str, monkeypatch) -> None:
    """Would catch a leak of that size that is called ready, and near-ties of a sound server that decide nothing."""
    monkeypatch.setattr(interference, "rows", lambda _: table(changed, *[EQUAL] * 7))
    monkeypatch.setattr(interference, "most_at_once", lambda _: 8)
    observed = Observed("m", "chat", ("interference",), profile="bf16")
    assert interference.judge(observed).outcome.status == status


@pytest.mark.parametrize(
    ("said", "severity", "status"),
    [({}, "warning", "not_run"), ({"given_up": 0.1}, "note", "passed"), ({"given_up": 0.9}, "blocker", "failed")],
)
def test_a_reference_decides_what_is_in_doubt(said: dict, severity: str, status: str, monkeypatch) -> None:
    """Would catch a doubt that nobody settles though a reference followed the answer, and one settled by half."""
    monkeypatch.setattr(interference, "rows", lambda _: table(moved(0.7), parted(1.1), *[EQUAL] * 6))
    monkeypatch.setattr(interference, "most_at_once", lambda _: 8)
    observed = Observed("m", "chat", ("interference",), profile="bf16")
    assert interference.doubtful(observed) == ("surge/together/0.0", "surge/together/0.1")
    agrees = Followed("surge/together/0.0", 24, {"given_up": 0.0}, {"given_up": 0.5}, 0)
    told = (agrees, Followed("surge/together/0.1", 24, said, {"given_up": 0.5}, 3)) if said else (agrees,)
    answer = interference.judge(replace(observed, doubted=told))
    assert [f.severity for f in answer.findings] == [severity]
    assert answer.outcome.status == status


def test_one_text_of_the_same_tokens() -> None:
    """Would catch two texts of the same tokens that pass as a tie."""
    assert found(table(Difference(None, None, 0.0, 3), EQUAL)) == [("surge", "blocker")]


def test_without_log_probabilities_a_parting_is_told() -> None:
    """Would catch a changed answer that nobody hears of, and one that fails where ties are common."""
    unknown = Difference(None, None, None, 3)
    assert found(table(unknown, unknown)) == [("ties, surge", "warning")]
    assert found(table(unknown, unknown), profile="fp32") == [("surge", "blocker")]
