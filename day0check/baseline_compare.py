"""Compares a run with a recorded baseline: bits, numbers, choices, speed, memory. Pure functions; the gate decides.

What changes without harm (other bits, choices that follow other scores, a busy machine) is noted; what fails is a drift
of an operator's ratios, another choice from the same inputs, a slowdown or more memory, each beyond an effect floor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from day0check.baseline import Baseline, Entry, Tap, differing_parts
from day0check.baseline_speed import ALL, SpeedRow, speed_rows
from day0check.gate import BASELINE, Scene
from day0check.types import CheckOutcome, Finding, NotRun, finding_id
from day0check.verdict_rows import used

BITS, DRIFT, FORMS, CHOICES, SPEED, MEMORY = (
    f"{BASELINE}{n}" for n in ("bits", "drift", "forms", "choices", "speed", "memory")
)
PINNED_TAPS = 3  # a form that fewer taps fit may have fitted by chance
WHOLE_FACTOR, WHOLE_FLOOR = 1.15, 0.08  # root mean square of the whole ratio over an operator's taps: steady
WORST_FACTOR, WORST_FLOOR = 1.5, 0.3  # of the worst row, column, tile, element: heavy-tailed
MEMORY_FACTOR, MEMORY_FLOOR_BYTES = 1.10, 64 << 20


@dataclass(frozen=True)
class Comparison:
    """`record` goes to `measured.baseline`: everything in time and bytes, and the tables of the page."""

    outcomes: tuple[CheckOutcome, ...] = ()
    findings: tuple[Finding, ...] = ()
    not_run: tuple[NotRun, ...] = ()
    record: dict[str, Any] = field(default_factory=dict)

    def into(self, scene: Scene) -> Scene:
        measured = {**scene.measured, "baseline": self.record}
        return replace(scene, measured=measured, not_run=(*scene.not_run, *self.not_run))


def compare_run(
    baseline: Baseline, run: Mapping[str, Entry], *, changes: tuple[str, ...] = (), partial: bool = False
) -> Comparison:
    """The comparison of every case of the run (by id) with the entry of the same key.

    A case without one is not run, and the message says what part of the key differs; so is a recorded case that the
    run lacks, unless the run is `partial`. `changes`: what changed in the environment, one sentence each.
    """
    outcomes: list[CheckOutcome] = []
    findings: list[Finding] = []
    numbers: list[dict[str, Any]] = []
    memory: list[dict[str, Any]] = []
    pairs: list[tuple[Entry, Entry]] = []
    for case, now in run.items():
        then = next((e for e in baseline.entries if e.key == now.key), None)
        if then is None:
            outcomes.append(CheckOutcome(f"{BASELINE}key", "not_run", case, _why_not(baseline, now)))
            continue
        pairs.append((then, now))
        for answer, found in (_bits(then, now), _drift(then, now, numbers), _forms(then, now), _choices(then, now)):
            outcomes += [answer] if answer is not None else []
            findings += found
        answer, found = _memory(then, now, memory)
        outcomes.append(answer)
        findings += found
    rows = speed_rows(pairs)
    outcomes += _speed_outcomes(rows, partial)
    findings += [_slow(row) for row in rows if row.verdict == "failed"]
    record = {
        "name": baseline.name,
        "sentence": _sentence(baseline, pairs, outcomes, rows),
        "environment_changes": list(changes),
        "numbers": numbers,
        "speed": [row.record() for row in rows],
        "memory": memory,
    }
    return Comparison(tuple(outcomes), tuple(findings), _missing(baseline, run, partial), record)


def _sentence(
    baseline: Baseline, pairs: list[tuple[Entry, Entry]], outcomes: Iterable[CheckOutcome], rows: Iterable[SpeedRow]
) -> str:
    failed = list(dict.fromkeys(o.name.removeprefix(BASELINE) for o in outcomes if o.status == "failed"))
    dates = sorted({str(then.recorded.get("at", ""))[:10] for then, _ in pairs} - {""})
    head = f"Against baseline {baseline.name}" + (f" of {dates[-1]}" if dates else "")
    if not pairs:
        return f"{head}: no case could be compared."
    undecided = [f"{row.phase} of {row.what}" for row in rows if row.verdict == "straddles"]
    if failed:
        what = f"worse in {', '.join(failed)}"
    elif undecided:
        what = f"bits, numbers, choices and memory are no worse, the speed of {', '.join(undecided)} is not decided: "
        what += "the interval reaches past the limit; measure again on a quiet machine"
    else:
        what = "bits, numbers, choices, speed and memory are no worse"
    return f"{head}: {len(pairs)} cases compared, {what}."


def _why_not(baseline: Baseline, now: Entry) -> str:
    same = [e for e in baseline.entries if e.case == now.case]
    if not same:
        return f"baseline {baseline.name} holds no case {now.case}"
    parts = min((differing_parts(e.key, now.key) for e in same), key=len)
    return f"baseline {baseline.name} holds this case with another {', another '.join(parts)}"


def _missing(baseline: Baseline, run: Mapping[str, Entry], partial: bool) -> tuple[NotRun, ...]:
    if partial:
        return ()
    lacking = sorted({e.case for e in baseline.entries} - set(run))
    return tuple(NotRun(f"{BASELINE}case of {c}", "the baseline holds it, the run did not finish it") for c in lacking)


# ----------------------------------------------------------------------------------------------- bits and numbers


def _changed(then: Entry, now: Entry) -> list[Tap]:
    """Taps of both with other bits, in order of execution; of the baseline's unstable ones nothing is said."""
    both = [k for k in now.taps if k in then.taps and k not in then.unstable]
    changed = [k for k in both if then.taps[k].digest and now.taps[k].digest != then.taps[k].digest]
    return sorted((now.taps[k] for k in changed), key=lambda t: (t.order, t.tap, t.phase))


def _bits(then: Entry, now: Entry) -> tuple[CheckOutcome, tuple[Finding, ...]]:
    lost = [k for k in then.taps if k not in now.taps]
    if lost:
        text = f"{len(lost)} taps of the baseline were not seen, the first: {lost[0].replace('|', ' in ')}"
        return CheckOutcome(BITS, "not_run", now.case, text), ()
    digests = sum(bool(t.digest) for t in then.taps.values())
    if not digests:
        return CheckOutcome(BITS, "not_run", now.case, "the baseline holds no digest of any tap"), ()
    changed = _changed(then, now)
    if not changed:
        return CheckOutcome(BITS, "passed", now.case, f"{digests} of {digests} taps bit for bit the same"), ()
    first = changed[0]
    text = f"{len(changed)} of {digests} taps have other bits, the first: {first.tap} in {first.phase}"
    note = _finding(BITS, first, "other bits", f"case {now.case}: {text}", now.case, severity="note")
    return CheckOutcome(BITS, "passed", now.case, text), (note,)


@dataclass(frozen=True)
class _Level:
    """A statistic of an operator over its taps. `whole` is a root mean square, every other the largest."""

    value: float
    limit: float
    tap: Tap


def _levels(taps: Iterable[Tap]) -> dict[tuple[str, str], _Level]:
    grouped: dict[tuple[str, str], list[Tap]] = {}
    for tap in taps:
        for name in tap.statistics:
            grouped.setdefault((tap.operator, name), []).append(tap)
    levels = {}
    for (operator, name), members in grouped.items():
        worst = max(members, key=lambda t: _size(used(t.statistics[name], t.limits[name])))
        value, weight = worst.statistics[name], sum(t.elements for t in members)
        if name == "whole" and weight:
            value = (sum(t.elements * t.statistics[name] ** 2 for t in members) / weight) ** 0.5
        levels[operator, name] = _Level(value, worst.limits[name], worst)
    return levels


def _size(value: float | None) -> float:
    return -1.0 if value is None else value


def _drift(then: Entry, now: Entry, rows: list[dict[str, Any]]) -> tuple[CheckOutcome, tuple[Finding, ...]]:
    findings, compared = [], 0
    changed = {(t.operator, t.tap, t.phase) for t in _changed(then, now)}
    for source, old, new in (("local", then.taps, now.taps), ("net", then.net, now.net)):
        before, after = _levels(old.values()), _levels(new.values())
        for key in sorted(set(before) & set(after)):
            compared += 1
            if _drifted(key[1], before[key], after[key]):
                findings.append(_drift_finding(key, source, before[key], after[key], now.case))
        if source == "local":
            rows += _number_rows(before, after, old, changed, now.case)
    if not compared:
        return CheckOutcome(DRIFT, "not_run", now.case, "the baseline holds no statistic of any tap"), ()
    if findings:
        text = f"{len(findings)} of {compared} statistics drifted, the first: {findings[0].message}"
        return CheckOutcome(DRIFT, "failed", now.case, text), tuple(findings)
    return CheckOutcome(DRIFT, "passed", now.case, f"{compared} statistics of operators no worse"), ()


def _forms(then: Entry, now: Entry) -> tuple[CheckOutcome | None, tuple[Finding, ...]]:
    """A form tighter than the claimed one that all taps of an operator fitted when the baseline was recorded is pinned:
    a run that needs the wider claim has lost precision inside it. None where nothing is pinned."""
    pinned = [(o, form) for o, forms in then.fits.items() for form, taps in forms.items() if taps >= PINNED_TAPS]
    tried = [(o, form) for o, form in pinned if form in now.fits.get(o, {})]
    if not pinned:
        return None, ()
    if len(tried) < len(pinned):
        operator, form = next(p for p in pinned if p not in tried)
        text = f"{operator} was not tried in form '{form}', which the baseline holds it to"
        return CheckOutcome(FORMS, "not_run", now.case, text), ()
    lost = [(o, form) for o, form in tried if not now.fits[o][form]]
    findings = []
    for operator, form in lost:
        tap = next(t for t in sorted(now.taps.values(), key=lambda t: t.order) if t.operator == operator)
        text = f"case {now.case}: {operator} needs more rounding than form '{form}', which it fitted in the baseline"
        findings.append(_finding(FORMS, tap, f"looser than {form}", text, now.case))
    if findings:
        return CheckOutcome(FORMS, "failed", now.case, findings[0].message), tuple(findings)
    return CheckOutcome(FORMS, "passed", now.case, f"{len(tried)} forms tighter than claimed still fit"), ()


def _drifted(name: str, before: _Level, after: _Level) -> bool:
    if not after.value == after.value:  # NaN
        return before.value == before.value
    factor, floor = (WHOLE_FACTOR, WHOLE_FLOOR) if name == "whole" else (WORST_FACTOR, WORST_FLOOR)
    return after.value > before.value * factor and after.value - before.value > floor * (before.limit or 1.0)


def _drift_finding(key: tuple[str, str], source: str, before: _Level, after: _Level, case: str) -> Finding:
    operator, name = key
    seen = "" if source == "local" else " in the propagated comparison"
    message = f"{operator}{seen}, case {case}: {name} rose from {before.value:.4g} to {after.value:.4g}"
    found = _finding(DRIFT, after.tap, f"{source} {name}", f"{message}, worst in {after.tap.tap}", case)
    return replace(found, value=after.value, limit=before.value)


def _number_rows(
    before: Mapping[tuple[str, str], _Level],
    after: Mapping[tuple[str, str], _Level],
    taps: Mapping[str, Tap],
    changed: set[tuple[str, str, str]],
    case: str,
) -> list[dict[str, Any]]:
    """A row for each operator with other bits or a drift, its statistic that rose most."""
    rows = []
    for operator in sorted({t.operator for t in taps.values()}):
        bits = sum(name == operator for name, _, _ in changed)
        keys = [k for k in before if k[0] == operator and k in after]
        if not keys or not (bits or any(_drifted(k[1], before[k], after[k]) for k in keys)):
            continue
        key = max(keys, key=lambda k: (_drifted(k[1], before[k], after[k]), after[k].value - before[k].value))
        drifted = _drifted(key[1], before[key], after[key])
        rows.append(
            {
                "case": case,
                "operator": operator,
                "taps": sum(t.operator == operator for t in taps.values()),
                "bits_changed": bits,
                "statistic": key[1],
                "was": before[key].value,
                "now": after[key].value,
                "verdict": "failed" if drifted else "changed",
            }
        )
    return rows


def _choices(then: Entry, now: Entry) -> tuple[CheckOutcome, tuple[Finding, ...]]:
    """Another choice from the same inputs is another rule, and fails; one that follows other inputs is a note."""
    total = sum(t.kind == "choose" and bool(t.digest) for t in then.taps.values())
    if not total:
        return CheckOutcome(CHOICES, "not_run", now.case, "the baseline holds no digest of a choice"), ()
    changed = _changed(then, now)
    choices = [t for t in changed if t.kind == "choose"]
    if not choices:
        return CheckOutcome(CHOICES, "passed", now.case, f"{total} of {total} choices the same"), ()
    others = [c for c in choices if not _inputs_changed(c, changed, now)]
    if others:
        first = others[0]
        text = f"{first.tap} ({first.phase}) chooses otherwise than the baseline from the same inputs: another rule"
        found = _finding(CHOICES, first, "another rule", f"case {now.case}: {text}", now.case)
        return CheckOutcome(CHOICES, "failed", now.case, f"{len(choices)} of {total} changed; {text}"), (found,)
    text = f"{len(choices)} of {total} choices changed, each with its inputs, the first: {choices[0].tap}"
    severity = "warning" if then.tokens != now.tokens else "note"
    found = _finding(CHOICES, choices[0], "follows", f"case {now.case}: {text}", now.case, severity=severity)
    return CheckOutcome(CHOICES, "passed", now.case, text), (found,)


def _inputs_changed(choice: Tap, changed: list[Tap], now: Entry) -> bool:
    """Whether what the choice reads has other bits: the call just before it at the same place, in the same phase."""
    place = choice.tap.split(f"{choice.operator}")[0]
    before = [
        t
        for t in now.taps.values()
        if t.phase == choice.phase and t.order < choice.order and t.tap.startswith(place) and t.digest
    ]
    if not before:
        return bool(changed) and changed[0] != choice
    producer = max(before, key=lambda t: t.order)
    return any((t.tap, t.phase) == (producer.tap, producer.phase) for t in changed)


# ------------------------------------------------------------------------------------------------ speed and memory


def _speed_outcomes(rows: list[SpeedRow], partial: bool) -> list[CheckOutcome]:
    outcomes = []
    for row in rows:
        status, summary = "passed", f"{row.phase}: figures under measured.baseline.speed"
        if row.verdict == "too few":
            status, summary = "passed" if partial else "not_run", f"{row.phase}: too few samples to judge the speed"
        elif row.verdict == "failed":
            status = "failed"
        outcomes.append(CheckOutcome(SPEED, status, _case_of(row), summary))
    return outcomes


def _case_of(row: SpeedRow) -> str:
    return "" if row.what == ALL else row.what


def _slow(row: SpeedRow) -> Finding:
    """No figure of time stands in a finding: they differ from run to run, and are under `measured`."""
    return Finding(
        id=finding_id(SPEED, None, "", row.phase, "slower"),
        severity="blocker",
        check=SPEED,
        operator=None,
        message=f"{row.phase} of {row.what} is slower than the baseline allows; see measured.baseline.speed",
        phase=row.phase if row.phase in ("prefill", "decode", "serve") else None,
        stack_layer="framework",
        evidence={"pattern": "slower", "case": _case_of(row)},
    )


def _memory(then: Entry, now: Entry, rows: list[dict[str, Any]]) -> tuple[CheckOutcome, tuple[Finding, ...]]:
    was, is_ = (max((r.peak_rss_bytes for r in e.runs), default=0) for e in (then, now))
    if not was or not is_:
        return CheckOutcome(MEMORY, "not_run", now.case, "no peak of memory was recorded"), ()
    failed = is_ > was * MEMORY_FACTOR and is_ - was > MEMORY_FLOOR_BYTES
    rows.append(
        {
            "what": now.case,
            "was_bytes": was,
            "now_bytes": is_,
            "limit": MEMORY_FACTOR,
            "verdict": "failed" if failed else "passed",
        }
    )
    summary = "figures under measured.baseline.memory"
    if not failed:
        return CheckOutcome(MEMORY, "passed", now.case, summary), ()
    found = Finding(
        id=finding_id(MEMORY, None, "", None, "more memory"),
        severity="blocker",
        check=MEMORY,
        operator=None,
        message=f"case {now.case} takes more memory than the baseline allows; {summary}",
        stack_layer="framework",
        evidence={"pattern": "more memory", "case": now.case},
    )
    return CheckOutcome(MEMORY, "failed", now.case, summary), (found,)


def _finding(check: str, tap: Tap, pattern: str, message: str, case: str, *, severity: Any = "blocker") -> Finding:
    layer = tap.tap.split(".")[1] if tap.tap.startswith("layers.") else ""
    return Finding(
        id=finding_id(check, tap.operator, "", tap.phase, pattern),
        severity=severity,
        check=check,
        operator=tap.operator,
        message=message,
        layer=int(layer) if layer.isdigit() else None,
        phase=tap.phase if tap.phase in ("start", "load", "prefill", "decode", "serve") else None,
        evidence={"pattern": pattern, "case": case, "tap": tap.tap, "order": tap.order},
    )
