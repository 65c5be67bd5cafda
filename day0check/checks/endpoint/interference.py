"""Requests beside each other: an answer may depend on its own prompt only, never on what else is in flight."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from day0check.checks.endpoint.answer import answered, found
from day0check.checks.endpoint.compare import (
    DELTA_LIMITS,
    MARGIN_LIMITS,
    OTHER_DELTA,
    OTHER_MARGIN,
    Difference,
    difference,
    full_text,
)
from day0check.checks.endpoint.exercised import most_at_once, paths
from day0check.checks.endpoint.wire import differing_streams
from day0check.checks.evidence import Answer
from day0check.load.observed import Observed
from day0check.types import Finding, Severity

QUESTION = "Does a request get the same answer beside others as alone, and nothing of theirs?"
NAME = "endpoint.interference"
FEWEST = 2
_CANARY = re.compile(r"The password is ([a-z]{12})\.")
BESIDE = "beside others"
SURGE, CONTROL = "surge", "surge/beside"
WAYS = {"warm prefix": ("prefix/cold", "prefix/warm"), SURGE: ("surge/alone", "surge/together")}
WORDS = {  # (pattern of a changed answer, how it was asked)
    BESIDE: ("changed", "beside other requests than alone"),
    "warm prefix": ("warm prefix", "the second time, when their prefix may come from a cache, than the first"),
    SURGE: (SURGE, "among many long requests, when memory may run short, than alone"),
}
MOST_TURNED, TURNED = 0.25, 2.0  # of the prompts; nats that a choice inside the model may move a token
NOISES = 8.0  # a change within this many of the largest change between sequential repeats is their noise


@dataclass(frozen=True)
class Row:
    """One prompt: its sequential repeat and one of its answers beside others, both against the answer alone."""

    prompt: str
    label: str
    repeat: Difference
    beside: Difference


def rows(observed: Observed) -> tuple[Row, ...]:
    """The interference table: every answer beside others whose prompt was answered alone, twice."""
    alone, again = observed.under("alone"), observed.under("again")
    streams_differ = bool(differing_streams(observed)[0])
    table = []
    for key, exchange in observed.under("together").items():
        prompt = key.partition("/")[2]
        one, two = alone.get(prompt), again.get(prompt)
        if one is None or two is None or not (one.good and two.good and exchange.good):
            continue
        if exchange.reply.streamed and streams_differ:
            continue  # the check of the wire says so; others in flight are not to blame
        repeat, beside = difference(one.answer, two.answer), difference(one.answer, exchange.answer)
        table.append(Row(prompt, exchange.label, repeat, beside))
    return tuple(table)


def further_rows(observed: Observed, table: tuple[Row, ...]) -> dict[str, tuple[Row, ...]]:
    """Rows of other ways to disturb an answer: a warm prefix against a cold one, a surge of long requests.

    Where a prompt was also asked beside one other of its length, that is its noise: sums in another order, which a long
    prompt shows more. Else it is that of the sequential repeats of `table`; where those are not steady nothing can be
    said.
    """
    if not table or not all(r.repeat.same_text for r in table):
        return {}
    usual = max((r.repeat for r in table), key=lambda repeat: repeat.delta or 0.0)
    controls = observed.under(CONTROL)
    found: dict[str, tuple[Row, ...]] = {}
    for way, (before, after) in WAYS.items():
        first, then = observed.under(before), observed.under(after)
        made = []
        for key, e in first.items():
            control = controls.get(key) if way == SURGE else None
            repeat = difference(e.answer, control.answer) if control is not None and control.good else usual
            if e.good and key in then and then[key].good:
                made.append(Row(f"{way}/{key}", then[key].label, repeat, difference(e.answer, then[key].answer)))
        found[way] = tuple(made)
    return found


def judge(observed: Observed) -> Answer:
    """A changed answer is wrong where the choice was clear or log-probabilities moved more than precision and
    sequential repeats explain; a tie that fell the other way is a warning."""
    together = observed.under("together")
    table = rows(observed)
    findings = [*_leaks(observed), *_changed(table, observed, BESIDE)]
    for way, members in further_rows(observed, table).items():
        findings += _changed(members, observed, way)
    overlap = most_at_once([e for e in together.values() if e.good])
    not_run = ""
    if len(table) < FEWEST:
        busy = sum(e.reply.status in (429, 503) for e in together.values())
        not_run = f"{len(table)} of {len(together)} prompts were answered alone and beside others, {busy} refused"
    elif overlap < FEWEST:
        not_run = "no two requests were in flight together, so nothing was beside anything"
    else:
        not_run = _undecided(findings)
    proof = ", ".join(path.words for path in paths(observed))
    summary = f"{len(table)} answers beside others are those alone, but for near-ties that are told; {proof}"
    return answered(NAME, findings, summary, not_run=not_run)


def _undecided(findings: list[Finding]) -> str:
    """Why nothing is decided of changed answers: what changed is more than rounding and too little to accuse."""
    changed = [f for f in findings if f.evidence.get("decided") is False]
    return f"neither rounding nor a fault is shown: {changed[0].message}" if changed else ""


def doubtful(observed: Observed) -> tuple[str, ...]:
    """Labels of changed answers of which nothing can be decided without a reference."""
    table, labels = rows(observed), []
    for way, members in {BESIDE: table, **further_rows(observed, table)}.items():
        wrong, limits, _ = _beyond(members, observed, way)
        if wrong and not _is_slight(wrong, limits, way) and _is_doubtful(wrong, observed, members):
            labels += [r.label for r in wrong]
    return tuple(labels)


def _leaks(observed: Observed) -> list[Finding]:
    owners: dict[str, str] = {}
    answers = [
        e for e in observed.exchanges if e.label.partition("/")[0] in ("alone", "again", "together", "after_cancel")
    ]
    for e in answers:
        match = _CANARY.search(json.dumps(e.asked))
        if match:
            owners.setdefault(match[1], e.label.rpartition("/")[2])
    for e in answers:
        text, own = full_text(e.answer), e.label.rpartition("/")[2]
        for canary, owner in owners.items():
            if owner != own and canary in text:
                message = f"the answer {e.label!r} holds the password of prompt {owner}: one request reads another's"
                return [found(NAME, "leak", message, label=e.label)]
    return []


@dataclass(frozen=True)
class Limits:
    """What rounding may do, in nats: to a log-probability, and to the lead of a token that another one overtakes."""

    delta: float
    margin: float

    def broken_by(self, row: Row, profile: str) -> bool:
        beside = row.beside
        if beside.delta is not None and beside.delta > self.delta:
            return True
        if beside.same_text:
            return False
        if beside.delta is not None and beside.at is None:
            return True  # the same tokens cannot have two texts
        if beside.margin is None:
            return profile == "fp32" and beside.delta is None  # with equal repeats a tie is too rare to assume one
        return beside.margin > self.margin

    def excess(self, row: Row) -> float:
        return max((row.beside.delta or 0.0) / self.delta, (row.beside.margin or 0.0) / self.margin)


def _limits(table: tuple[Row, ...], profile: str, way: str) -> tuple[Limits, float]:
    """(limits, noise): from the claimed precision, and wider where repeats move by more.

    Beside others the repeat is the same request again, and any multiple of its noise is noise. Of long requests it is
    the request beside one other: that may show a fault, too, so it widens the limits to twice the claimed precision's
    and no further. A lead is the difference of two log-probabilities, so it may move by twice as much.
    """
    delta = DELTA_LIMITS.get(profile, OTHER_DELTA)
    margin = MARGIN_LIMITS.get(profile, OTHER_MARGIN)
    noise = max((r.repeat.delta or 0.0 for r in table), default=0.0)
    if way == BESIDE:
        wide = max(delta, NOISES * noise)
        return Limits(wide, max(margin, wide / 2)), noise
    noise = max([noise, *((r.repeat.margin or 0.0) / 2 for r in table if not r.repeat.same_text)])
    return Limits(min(max(delta, 2 * noise), 2 * delta), min(max(margin, 4 * noise), 2 * delta)), noise


def _beyond(table: tuple[Row, ...], observed: Observed, way: str) -> tuple[list[Row], Limits, float]:
    """(rows whose prompt is answered steadily and that are beyond the limits, limits, noise)."""
    limits, noise = _limits(table, observed.profile, way)
    return [r for r in _steady(table, way) if limits.broken_by(r, observed.profile)], limits, noise


def _steady(table: tuple[Row, ...], way: str) -> list[Row]:
    return [r for r in table if r.repeat.same_text or way == SURGE]


def _changed(table: tuple[Row, ...], observed: Observed, way: str) -> list[Finding]:
    wrong, limits, noise = _beyond(table, observed, way)
    other = [r for r in _steady(table, way) if r not in wrong and not r.beside.same_text]
    if wrong:
        return [_wrong(wrong, table, observed, way, limits, noise)]
    if not other:
        return []
    pattern, how = WORDS[way]
    first = other[0]
    known = first.beside.delta is not None
    why = "at near-ties, as rounding can" if known else "and without log-probabilities ties cannot be told from faults"
    message = (
        f"{_prompts(len({r.prompt for r in other}), 'gets another text', 'get other texts')} {how}, {why}: "
        f"{first.label!r} {_in_words(first.beside)}"
    )
    name = "ties" if way == BESIDE else f"ties, {pattern}"
    return [_finding(name, message, first, other, limits.delta, severity="note" if known else "warning")]


def _is_slight(wrong: list[Row], limits: Limits, way: str) -> bool:
    """Whether it is a single long prompt that is hardly beyond its limit: that may be chance among many."""
    return way != BESIDE and len(wrong) == 1 and 1 < limits.excess(wrong[0]) <= 2


def _is_doubtful(wrong: list[Row], observed: Observed, table: tuple[Row, ...]) -> bool:
    """Whether what is beyond the limits may still be no fault: a few prompts in a lower precision, where the sums of a
    batch are rounded otherwise and a choice inside the model (an expert, a key) can turn. That moves a token by more
    than rounding, and not by as much as another request's content does. A fault can move as little."""
    prompts, asked = len({r.prompt for r in wrong}), len({r.prompt for r in table})
    few = observed.profile != "fp32" and prompts <= MOST_TURNED * asked
    return few and all(max(r.beside.delta or 0.0, r.beside.margin or 0.0) <= TURNED for r in wrong)


def _wrong(
    wrong: list[Row], table: tuple[Row, ...], observed: Observed, way: str, limits: Limits, noise: float
) -> Finding:
    """What is in doubt is a warning, and the check is then undecided, unless a reference has followed each answer."""
    pattern, how = WORDS[way]
    first = max(wrong, key=limits.excess)
    again = "the same beside one other" if way == SURGE else "sequential repeats"
    message = (
        f"{_prompts(len({r.prompt for r in wrong}), 'is', 'are')} answered otherwise {how}, more than rounding in "
        f"{observed.profile} explains: {first.label!r} {_in_words(first.beside)}; {again} "
        f"{'are equal' if noise == 0 else f'move by {noise:.3g}'}"
    )
    if _is_slight(wrong, limits, way):
        return _finding(pattern, message, first, wrong, limits.delta, severity="warning")
    if not _is_doubtful(wrong, observed, table):
        return _finding(pattern, message, first, wrong, limits.delta)
    severity, words = _in_doubt(wrong, observed)
    return _finding(
        pattern, f"{message}; {words}", first, wrong, limits.delta, severity=severity, decided=severity != "warning"
    )


def _in_doubt(wrong: list[Row], observed: Observed) -> tuple[Severity, str]:
    """How bad a change beside others is that may be no fault, and why: what the reference says, if it was asked."""
    followed = {r.label: r for r in observed.doubted}
    if not all(r.label in followed for r in wrong):
        return "warning", (
            "a choice inside the model, as of an expert, that falls otherwise in a batch can do that, too: see whether "
            "other prompts (--seed) change, or the same in float32; with --reference an oracle decides"
        )
    unlike = [r.label for r in wrong if followed[r.label].failing]
    if unlike:
        return "blocker", f"and the reference, which follows each of them, disagrees with {unlike[0]!r}"
    return "note", (
        "the reference, which follows each of them, agrees within rounding: a choice inside the model fell otherwise"
    )


def _finding(pattern: str, message: str, first: Row, members: list[Row], limit: float, **more) -> Finding:  # type: ignore[no-untyped-def]
    table = [
        {"label": r.label, "token": r.beside.at, "margin": r.beside.margin, "delta_logprob": r.beside.delta}
        for r in members
    ]
    return found(
        NAME, pattern, message, label=first.label, value=first.beside.delta, limit=limit, rows=table[:32], **more
    )


def _prompts(count: int, one: str, many: str) -> str:
    return f"{count} prompt {one}" if count == 1 else f"{count} prompts {many}"


def _in_words(beside: Difference) -> str:
    parts = []
    if beside.at is not None:
        lead = f", where the choice was clear by {beside.margin:.3g} nats" if beside.margin is not None else ""
        parts.append(f"differs from token {beside.at} on{lead}")
    elif not beside.same_text:
        parts.append(f"differs from character {beside.text_at} on")
    if beside.delta is not None:
        parts.append(f"|change of log-probability| up to {beside.delta:.3g}")
    return ", ".join(parts) or "differs"
