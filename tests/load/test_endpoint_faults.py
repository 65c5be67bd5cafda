"""Every fault of the scripted endpoint is caught and named, and what is merely unusual raises nothing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from mock_endpoint import BENIGN, FAULTS, Endpoint, serving

from day0check.checks.endpoint import ENDPOINT_CHECKS, endpoint_checks_of, judge_endpoint
from day0check.checks.endpoint import needle as needle_check
from day0check.checks.endpoint.parameters import classify
from day0check.checks.evidence import Answer
from day0check.load.client import Limits, target_of
from day0check.load.observe import Seen, observe
from day0check.load.observed import Observed
from day0check.load.scenario import PARTS, Wish
from day0check.load.speed import SpeedPlan

QUICK = Limits(stall_s=0.4, request_s=1.5, seconds=6)  # of faulty servers; a busy machine is no fault of a sound one


@dataclass(frozen=True)
class Expected:
    """Which part shows a fault, which check names it, by which pattern."""

    part: str
    check: str
    pattern: str
    severity: str = "blocker"


E = Expected
TABLE: dict[str, Expected] = {
    "mute": E("wire", "protocol", "silent"),
    "dead": E("wire", "protocol", "health green while dead"),
    "stall": E("wire", "protocol", "stalled"),
    "late": E("wire", "protocol", "late"),
    "drop": E("wire", "protocol", "dropped"),
    "truncate": E("wire", "protocol", "no_finish"),
    "no_done": E("wire", "protocol", "no_done", "warning"),
    "no_usage": E("wire", "protocol", "no_usage", "warning"),
    "garbage": E("wire", "protocol", "garbage"),
    "html": E("wire", "protocol", "garbage"),
    "error_after_200": E("wire", "protocol", "error_after_200"),
    "zero_chunks": E("wire", "protocol", "no_chunk"),
    "slow_start": E("wire", "protocol", "health green while dead"),
    "stumbles": E("wire", "protocol", "http_5xx"),
    "never_recovers": E("wire", "protocol", "given up"),
    "merged_events": E("wire", "protocol", "garbage"),
    "lost_chunk": E("wire", "wire", "stream"),
    "doubled_chunk": E("wire", "wire", "stream"),
    "reordered": E("wire", "wire", "stream"),
    "cut_characters": E("wire", "wire", "stream"),
    "unlike": E("wire", "wire", "repeat"),
    "wrong_finish": E("wire", "wire", "finish reason"),
    "wrong_usage": E("parameters", "usage", "completion"),
    "wrong_prompt_usage": E("parameters", "usage", "prompt"),
    "ignores_stop": E("parameters", "parameters", "stop ignored"),
    "shows_the_stop": E("parameters", "parameters", "stop_stream wrong"),
    "ignores_max_tokens": E("parameters", "parameters", "max_tokens ignored"),
    "ignores_logprobs": E("parameters", "parameters", "logprobs ignored"),
    "ignores_n": E("parameters", "parameters", "n ignored"),
    "ignores_echo": E("parameters", "parameters", "echo ignored"),
    "ignores_seed": E("parameters", "parameters", "seed ignored", "warning"),
    "ignores_temperature": E("parameters", "parameters", "temperature ignored"),
    "accepts_bad": E("parameters", "parameters", "bad temperature accepted", "warning"),
    "crashes_on_bad": E("parameters", "parameters", "bad temperature 5xx", "warning"),
    "leaks": E("interference", "interference", "leak"),
    "batch_dependent": E("interference", "interference", "changed"),
    "wrong_logprobs": E("interference", "interference", "changed"),
    "stale_image": E("wire", "images", "same answer"),
    "history_ignored": E("wire", "turns", "history ignored"),
    "hangs_after_cancel": E("interference", "cancel", "hangs"),
    "leaks_slots": E("interference", "cancel", "held"),
    "warm_prefix_differs": E("interference", "interference", "warm prefix"),
    "surge_differs": E("interference", "interference", "surge"),
    "forgets_the_middle": E("needle", "needle", "lost"),
    "leaks_cache": E("interference", "cancel", "cache held"),
    "impossible_logprobs": E("interference", "logprobs", "impossible"),
    "ignores_tools": E("tools", "tools", "tools ignored", "warning"),
    "drops_calls": E("tools", "tools", "both ways"),
    "broken_arguments": E("tools", "tools", "arguments"),
    "bunched": E("speed", "speed", "bunched", "warning"),
}


def run(*flags: str, parts: tuple[str, ...], **speed) -> Seen:  # type: ignore[no-untyped-def]
    plan = SpeedPlan(requests=3, concurrencies=(1,), warmup=2, words=6, rate_per_s=20.0, **speed)
    limits = QUICK if set(flags) & set(FAULTS) else Limits(stall_s=10, request_s=20)
    with serving(Endpoint(*flags, delay_s=0.0 if "bunched" in flags else 0.002)) as url:
        wish = Wish(parts=parts, together=8 if "differs" in "".join(flags) else 4, words=6, contexts=(1500,))
        return observe(target_of(url), wish, limits=limits, speed=plan)


def judged(seen: Seen) -> dict[str, Answer]:
    return {a.outcome.name: a for a in judge_endpoint(seen.observed, reference=False)}


def test_every_fault_is_in_the_table() -> None:
    """Would catch a fault of the scripted endpoint that nobody expects to be caught."""
    assert sorted(TABLE) == sorted(FAULTS)


@pytest.fixture(autouse=True)
def _shorter_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("day0check.load.scenario.SETTLE_S", 0.4)
    monkeypatch.setattr("day0check.load.scenario.RECOVER_S", 2.0)
    monkeypatch.setattr("day0check.load.client.LINGER_S", 0.02)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_and_named(fault: str, record_property) -> None:  # type: ignore[no-untyped-def]
    """Would catch a misbehaving server that passes, and a check that blames the wrong thing."""
    expected = TABLE[fault]
    named = f"endpoint.{expected.check}: {expected.pattern} ({expected.severity})"
    record_property("fault of the scripted endpoint", f"{fault:<22}{named}")
    answer = judged(run(fault, parts=(expected.part,)))[f"endpoint.{expected.check}"]
    found = {f.evidence["pattern"]: f for f in answer.findings}
    assert expected.pattern in found, found
    assert found[expected.pattern].severity == expected.severity
    assert (answer.outcome.status == "failed") == (expected.severity == "blocker")
    assert found[expected.pattern].phase == "serve"


def test_an_endpoint_that_stumbles_is_asked_on_when_it_stands_again() -> None:
    """Would catch questions that are spent on a server which says that it is not ready for a moment."""
    seen = run("stumbles", parts=("wire",))
    refused = [e.label for e in seen.observed.exchanges if e.reply.status == 503]
    assert len(refused) == 1
    assert seen.observed.stopped == ""


@pytest.mark.parametrize("habit", ["", *BENIGN])
def test_what_is_merely_unusual_raises_nothing(habit: str) -> None:
    """Would catch a false alarm on a sound endpoint that merges, splits or delays chunks, or lacks an API."""
    seen = run(*[habit] * bool(habit), parts=PARTS)
    answers = judged(seen)
    assert seen.observed.stopped == ""
    assert [f.message for a in answers.values() for f in a.findings] == []
    not_run = {name: a.outcome.summary for name, a in answers.items() if a.outcome.status != "passed"}
    not_run.pop("endpoint.speed", None)  # on a busy machine the client may be late, and says so
    assert not_run == {}


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [((), None), (("leaks_slots",), "held"), (("leaks_cache",), "cache held"), (("hangs_after_cancel",), "hangs")],
)
def test_a_soak_tells_what_is_not_given_back(flags: tuple[str, ...], pattern: str | None) -> None:
    """Would catch an endpoint that runs full over hours, and a soak that cries wolf."""
    limits = Limits(stall_s=0.4, request_s=1.5) if flags else Limits(stall_s=10, request_s=20)
    with serving(Endpoint(*flags, delay_s=0.002)) as url:
        seen = observe(
            target_of(url), Wish(parts=("soak",), soak=60, words=6), limits=limits, speed=SpeedPlan(requests=1)
        )
    answer = judged(seen)["endpoint.soak"]
    assert sum(seen.observed.soak.values()) == 60
    assert seen.observed.soak["left"] >= 5
    patterns = {f.evidence["pattern"] for f in answer.findings}
    assert answer.outcome.status == ("failed" if pattern else "passed"), answer.outcome.summary
    assert pattern in patterns if pattern else not patterns


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_repeats_of_a_sound_endpoint_raise_nothing() -> None:
    """Would catch a false alarm that chance brings once in a while."""
    parts = (*PARTS[:-1], "soak", "needle")
    for seed in range(50):
        with serving(Endpoint(delay_s=0.001)) as url:
            wish = Wish(parts=parts, words=6, seed=seed, soak=40, contexts=(600,))
            seen = observe(target_of(url), wish, limits=Limits(stall_s=20, request_s=40), speed=SpeedPlan())
        answers = judged(seen)
        assert [f.message for a in answers.values() for f in a.findings] == [], seed
        assert {a.outcome.status for a in answers.values()} == {"passed"}, seed


def test_needles_that_are_found_everywhere_raise_nothing() -> None:
    """Would catch a long context that is blamed without cause, and a model that finds nothing and passes."""
    answer = judged(run(parts=("needle",)))["endpoint.needle"]
    assert answer.outcome.status == "passed", answer.outcome.summary
    assert answer.outcome.summary.count("0 of 8 lost") == 3
    blind = Observed("m", "chat", ("needle",), done=("needle",))
    assert needle_check.judge(blind).outcome.status == "not_run"


@pytest.mark.parametrize(
    ("hits", "total", "low", "high"), [(0, 8, 0.0, 0.324), (8, 8, 0.676, 1.0), (5, 10, 0.237, 0.763)]
)
def test_the_interval_of_a_share(hits: int, total: int, low: float, high: float) -> None:
    """Would catch an interval that promises more than its few samples: figures of Wilson's formula in tables."""
    assert needle_check.wilson(hits, total) == pytest.approx((low, high), abs=0.001)


def test_parameters_are_classified_and_never_by_status() -> None:
    """Would catch support that is inferred from status 200."""
    states = {n: p.state for n, p in classify(run(parts=("parameters",)).observed).items()}
    assert {states[n] for n in ("max_tokens", "stop", "temperature", "seed", "n", "logprobs", "echo")} == {"honoured"}
    assert {states[n] for n in ("return_token_ids", "prompt_logprobs")} == {"ignored"}


def test_a_part_that_was_not_asked_for_is_not_judged() -> None:
    """Would catch checks that fail for want of evidence nobody asked for, and checks that vanish."""
    assert endpoint_checks_of((), reference=False) == ("endpoint.protocol", "endpoint.logprobs")
    assert "endpoint.oracle" in endpoint_checks_of((), reference=True)
    every = endpoint_checks_of((*PARTS, "needle", "soak"), reference=True)
    assert sorted(every) == sorted(ENDPOINT_CHECKS)
    assert all(module.QUESTION.endswith("?") for module in ENDPOINT_CHECKS.values())


def test_objectives_are_judged_from_the_open_loop() -> None:
    """Would catch an objective that nobody holds the latencies against."""
    missed = run(parts=("speed",), slos={"ttft_ms": 1e-6})
    bound = missed.observed.speed["open/poisson"]["client_bound"]
    answer = judged(missed)["endpoint.speed"]
    assert {f.evidence["pattern"] for f in answer.findings} == (set() if bound else {"objectives"})
    assert answer.outcome.status == ("not_run" if bound else "failed")
    met = judged(run(parts=("speed",), slos={"ttft_ms": 1e6}))["endpoint.speed"]
    assert not met.findings
