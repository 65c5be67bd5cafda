"""Memory that is made to run short over HTTP: preempted by the server's counters, right, and seen when it is not."""

import dataclasses

import pytest
from serve_client import make_engine, running, served

from day0check.accelerated.server.live import Live
from day0check.checks.endpoint import judge_endpoint
from day0check.checks.endpoint.exercised import paths
from day0check.load.client import Limits, target_of
from day0check.load.observe import observe
from day0check.load.scenario import Wish
from day0check.load.speed import SpeedPlan

SMALL = {"pages": 50, "max_model_len": 220}  # of 16 positions: four of eight requests at once
WISH = Wish(parts=("interference",), together=8, words=4, tokens=6)


class Forgetful(Live):
    """The latest token of a request that gave way is another one when it is computed again."""

    def _give_way(self, running, *, park, back):
        super()._give_way(running, park=park, back=back)
        running.tokens[-1] = 65


def asked(live):
    """(findings, preemption as the client proves it, preemptions as the server counts them)."""
    with running(make_engine(live=live, **SMALL)) as engine, served(engine) as client:
        limits = Limits(stall_s=60, request_s=120)
        seen = observe(target_of(f"http://{client.address}"), WISH, limits=limits, speed=SpeedPlan())
        counted = client.metric("vllm:num_preemptions_total")
    answers = judge_endpoint(dataclasses.replace(seen.observed, profile="fp32"), reference=False)
    (preempted,) = (path for path in paths(seen.observed) if path.name == "preemption")
    return [f for a in answers for f in a.findings], preempted, counted


@pytest.mark.slow
def test_preemption_is_forced_and_changes_nothing():
    """Catches preemption that is never reached, that nobody proves, or that changes an answer."""
    findings, preempted, counted = asked(Live)
    assert [f.message for f in findings] == []
    assert preempted.exercised
    assert counted > 0
    assert f"{counted:.0f} preemptions" in preempted.proof


def test_a_request_that_resumes_wrongly_is_seen():
    """Catches a surge that compares only requests whose memory nobody takes."""
    findings, preempted, _ = asked(Forgetful)
    assert preempted.exercised
    assert [(f.check, f.evidence["pattern"], f.severity) for f in findings] == [
        ("endpoint.interference", "surge", "blocker")
    ]
