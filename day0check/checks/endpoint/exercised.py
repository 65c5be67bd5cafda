"""Which paths of the endpoint the questions about interference really took, and what proves it: its own counters first,
then what could be seen from here. A path without proof is not exercised, whatever the answers were."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from day0check.checks.endpoint.compare import full_text
from day0check.load.observed import Observed
from day0check.load.records import Exchange

FULL = 0.9  # of a cache: less than that, and nobody had to give way
NO_COUNTERS = "it has no counters that could show it"


@dataclass(frozen=True)
class Path:
    """One way to disturb an answer. `proof`: what shows that it was taken, or why nothing does."""

    name: str
    exercised: bool
    proof: str

    @property
    def words(self) -> str:
        """Without the proof, whose numbers are another in every run."""
        return f"{self.name} {'exercised' if self.exercised else 'not exercised'}"


def paths(observed: Observed) -> tuple[Path, ...]:
    """Every path that the part `interference` means to take, in its order."""
    return tuple(rule(observed) for rule in (_together, _injected, _warm_prefix, _preempted, _left, _canaries))


def figures(observed: Observed) -> list[dict[str, Any]]:
    return [{"path": p.name, "exercised": p.exercised, "proof": p.proof} for p in paths(observed)]


def most_at_once(exchanges: Iterable[Exchange]) -> int:
    """The largest number of requests that were in flight at one moment, seen from here."""
    exchanges = list(exchanges)
    edges = sorted([(e.reply.sent_ns, 1) for e in exchanges] + [(e.reply.end_ns, -1) for e in exchanges])
    most = now = 0
    for _, step in edges:
        now += step
        most = max(most, now)
    return most


def _together(observed: Observed) -> Path:
    name, running = "requests together", observed.counter("peak_together").get("running")
    seen = most_at_once(e for e in observed.under("together").values() if e.good)
    if running is not None and running >= 2:
        return Path(name, True, f"its counters: {running:.0f} running at once")
    return Path(name, seen >= 2, f"{seen} in flight at once, seen from here")


def _injected(observed: Observed) -> Path:
    """A long prompt came while answers were on their way: chunks of theirs came before it was sent and after."""
    name = "long prompts into running answers"
    streams = [e for key, e in observed.under("together").items() if key.startswith("1/")]
    long = [e for e in observed.under("long").values() if e.good]
    if not long:
        return Path(name, False, _why_not(observed.under("long").values()))
    over = max(sum(_spans(stream, e.reply.sent_ns) for stream in streams) for e in long)
    running = observed.counter("peak_injected").get("running")
    counted = f", its counters: {running:.0f} running at once" if running is not None else ""
    sizes = [e.answer.usage.prompt_tokens for e in long if e.answer.usage]
    size = f" of {max(sizes)} tokens" if sizes else ""
    return Path(name, over > 0, f"{over} answers went on after a prompt{size} came{counted}")


def _spans(stream: Exchange, at_ns: int) -> bool:
    pieces = stream.answer.pieces
    return stream.good and bool(pieces) and pieces[0].at_ns < at_ns < pieces[-1].at_ns


def _warm_prefix(observed: Observed) -> Path:
    name = "warm prefix"
    spans = [("before_alone", "before_together"), *((f"between_warm/{i}", f"after_warm/{i}") for i in range(2))]
    hits = _growth(observed, "prefix_hits", spans)
    warm = observed.under("prefix/warm").values()
    cached = max((e.answer.usage.cached_tokens or 0 for e in warm if e.good and e.answer.usage), default=0)
    if hits:
        return Path(name, True, f"its counters: {hits:.0f} tokens of prompts found in the cache")
    if cached:
        return Path(name, True, f"usage: {cached} cached tokens of a prompt")
    if warm and not any(e.good for e in warm):
        return Path(name, False, _why_not(warm))
    return Path(name, False, NO_COUNTERS if hits is None else "its counters show no hit")


def _preempted(observed: Observed) -> Path:
    name = "preemption"
    spans = [("before_together", "after_together"), ("before_surge", "after_surge")]
    count = _growth(observed, "preemptions", spans)
    surge = observed.under("surge/together").values()
    most = most_at_once(e for e in surge if e.good)
    if count:
        return Path(name, True, f"its counters: {count:.0f} preemptions, {most} requests at once")
    if not any(e.good for e in surge):
        return Path(name, False, _why_not(surge) if surge else "too few requests were asked for to fill a cache")
    if count is None:
        return Path(name, False, NO_COUNTERS)
    peaks = [c.values["kv_usage"] for c in observed.counters if c.label.startswith("peak_") and "kv_usage" in c.values]
    full = f", its cache was at most {max(peaks):.0%} full" if peaks else ""
    full += "; a server started with a smaller one would show it" if peaks and max(peaks) < FULL else ""
    return Path(name, False, f"its counters show none with {most} requests at once{full}")


def _left(observed: Observed) -> Path:
    name = "clients that leave"
    left = [e for e in observed.under("cancel").values() if e.reply.fault == "cut" and e.answer.finish is None]
    counters = observed.counter("after_cancel/1")
    if not left:
        return Path(name, False, "no client left in the middle of an answer")
    back = counters.get("running", 0.0) + counters.get("waiting", 0.0) == 0
    shown = f"its counters: {'nothing runs or waits' if back else 'some still run'} afterwards"
    return Path(name, True, f"{len(left)} left in the middle of an answer; {shown if counters else NO_COUNTERS}")


def _canaries(observed: Observed) -> Path:
    kinds = ("alone", "again", "together", "after_cancel")
    searched = [e for e in observed.exchanges if e.label.partition("/")[0] in kinds and full_text(e.answer)]
    words = len(observed.under("alone"))
    proof = f"{len(searched)} answers were searched for the passwords of {words} prompts"
    return Path("canaries between requests", len(searched) > 1 and words > 1, proof)


def _growth(observed: Observed, counter: str, spans: list[tuple[str, str]]) -> float | None:
    """By how much a counter grew over the spans; None where the endpoint does not have it."""
    pairs = [(observed.counter(a), observed.counter(b)) for a, b in spans]
    known = [(a[counter], b[counter]) for a, b in pairs if counter in a and counter in b]
    return sum(max(0.0, b - a) for a, b in known) if known else None


def _why_not(exchanges: Iterable[Exchange]) -> str:
    first = next((e for e in exchanges if not e.good), None)
    if first is None:
        return "it was not asked"
    return f"the first was answered with {first.reply.fault or f'HTTP {first.reply.status}'}: {first.answer.error}"
