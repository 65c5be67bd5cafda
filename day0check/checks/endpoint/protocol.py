"""The form of every answer: complete, of one piece, in time. A status of 200 is no answer yet."""

from __future__ import annotations

from day0check.checks.endpoint.answer import answered, found
from day0check.checks.evidence import Answer
from day0check.load.observed import Observed
from day0check.load.records import Exchange
from day0check.types import Finding

QUESTION = "Is every answer complete and well-formed, and does the endpoint always answer in time?"
NAME = "endpoint.protocol"

HEALTH = "health green while dead"
FAULTS = {
    "refused": "refuses the connection in the middle of the run",
    "silent": "takes a request and sends no byte of an answer in time",
    "stalled": "stops sending in the middle of an answer and keeps the connection open",
    "late": "does not finish an answer in time",
    "dropped": "drops the connection before the answer is complete",
    "garbage": "answers with something that is no HTTP",
    "flood": "sends more than any answer may have",
}
FLAWS = {
    "garbage": ("blocker", "sends something that is no JSON where an answer should be"),
    "error_after_200": ("blocker", "answers status 200 and then an error inside the answer"),
    "no_choice": ("blocker", "answers status 200 without any choice"),
    "no_chunk": ("blocker", "answers status 200 and ends the stream without any content"),
    "cut_event": ("blocker", "ends a stream in the middle of an event"),
    "no_finish": ("blocker", "ends an answer without a finish reason"),
    "after_finish": ("blocker", "sends content after the finish reason"),
    "after_done": ("blocker", "sends events after [DONE]"),
    "broken_utf8": ("blocker", "sends bytes or characters that are no UTF-8"),
    "no_done": ("warning", "ends streams without [DONE]"),
    "no_usage": ("warning", "gives no usage"),
}
OPTIONAL = (
    "n",
    "echo",
    "token_ids",
    "token_ids_longer",
    "ignore_eos",
    "return_token_ids",
    "prompt_logprobs",
    "logprobs",
)
TOOLS = ("tools/", "forced")
CHOSEN = (*TOOLS, "temperature/", "seed/", "stop", "turns/", "needle/")  # what an endpoint may refuse with a clear 4xx
BUSY = (429, 503)
SURGE = "surge/"
AT_ONCE = ("together/", "long/", SURGE)
LONG = ("long/", "prefix/", "surge/")  # longer than an endpoint may be for, unless it says how long that is
_ELSEWHERE = ("bad/", "cancel/", "image/", "soak/")
_NO_ANSWERS = ("models", "health")


def judge(observed: Observed) -> Answer:
    """Findings are grouped by what is wrong; the first exchange that shows it is the address."""
    exchanges = [e for e in observed.exchanges if not e.label.startswith(_ELSEWHERE) and e.label not in _NO_ANSWERS]
    groups: dict[str, list[Exchange]] = {}
    for exchange in exchanges:
        for name in _wrongs(exchange, observed):
            groups.setdefault(name, []).append(exchange)
    findings = [_finding(name, members, len(exchanges)) for name, members in groups.items()]
    if observed.stopped and len(observed.done) < len(observed.parts) and "bounds" not in observed.stopped:
        findings.append(found(NAME, "given up", f"the endpoint was left alone: {observed.stopped}"))
    findings += _health_is_green(observed, exchanges)
    not_run = observed.stopped if not exchanges else ""
    count = sum(not e.label.startswith(SURGE) for e in exchanges)  # how many a surge needs is another in every run
    return answered(NAME, findings, f"{count} answers are complete and well-formed", not_run=not_run)


def _health_is_green(observed: Observed, exchanges: list[Exchange]) -> list[Finding]:
    """An endpoint that was given up, and that calls itself healthy: whoever sends it requests learns nothing."""
    health = observed.get("health")
    if not observed.stopped or "bounds" in observed.stopped or health is None or health.reply.status != 200:
        return []
    unanswered = [e for e in exchanges if not e.good and (e.reply.fault or e.reply.status >= 500)]
    if not unanswered:
        return []
    text = (
        f"/health is green (HTTP 200) while requests get no answer: {observed.stopped}; the last was "
        f"{unanswered[-1].label!r}"
    )
    return [found(NAME, HEALTH, text, label="health", count=len(unanswered))]


def _wrongs(exchange: Exchange, observed: Observed) -> list[str]:
    reply, answer = exchange.reply, exchange.answer
    if reply.fault in ("silent", "stalled", "late") and _waits_its_turn(exchange, observed):
        return []
    if reply.fault in FAULTS:
        return [reply.fault if reply.fault != "garbage" else "no_http"]
    if reply.status != 200:
        return _refusal(exchange, observed)
    wrongs = list(answer.flaws)
    if exchange.asked.get("stream") and not reply.streamed and "garbage" not in wrongs:
        wrongs.append("not_streamed")
    asks_usage = bool((exchange.asked.get("stream_options") or {}).get("include_usage"))
    if reply.streamed and asks_usage and answer.usage is None and not answer.error:
        wrongs.append("no_usage")
    return wrongs


def _waits_its_turn(exchange: Exchange, observed: Observed) -> bool:
    """Whether a request among many got no byte because others were served: one of them ended in the later half of its
    wait. A server that stood idle meanwhile has forgotten it."""
    reply = exchange.reply
    if reply.status or not exchange.label.startswith(AT_ONCE):
        return False
    middle = (reply.sent_ns + reply.end_ns) // 2
    ended = [e.reply.end_ns for e in observed.exchanges if e.good and e.label.startswith(AT_ONCE)]
    return any(middle < end_ns <= reply.end_ns for end_ns in ended)


def _refusal(exchange: Exchange, observed: Observed) -> list[str]:
    status = exchange.reply.status
    if status in BUSY and exchange.label.startswith(AT_ONCE):
        return []
    if status >= 500:
        return ["http_5xx_optional" if exchange.label in OPTIONAL or exchange.label.startswith(TOOLS) else "http_5xx"]
    if exchange.label.startswith(LONG) and observed.context is None:
        return []  # its context may be shorter; the check of interference says what was not exercised
    if exchange.label in OPTIONAL or exchange.label.startswith(CHOSEN):
        return []  # a clear no to a parameter: the check that asked says which
    if exchange.label.startswith("hello/") and not exchange.label.startswith(f"hello/{observed.api or '-'}"):
        return [] if observed.api else ["refuses"]
    return ["refuses"]


def _finding(name: str, members: list[Exchange], total: int) -> Finding:
    first = members[0]
    more = f"; {len(members)} of {total} answers" if len(members) > 1 else ""
    detail = first.answer.error or first.reply.detail
    said = f" ({detail})" if detail and name in ("error_after_200", "refused", "refuses", "http_5xx") else ""
    severity, words = FLAWS.get(name, ("blocker", ""))
    if name == "http_5xx_optional":
        severity, words = "warning", f"answers {first.reply.status} instead of a clear 4xx to a parameter that it lacks"
    elif name == "http_5xx":
        words = f"answers {first.reply.status} to a well-formed request"
    elif name == "refuses":
        words = f"refuses a well-formed request with {first.reply.status}"
    elif name == "not_streamed":
        words = "answers a request for a stream whole"
    elif name == "no_http":
        words = FAULTS["garbage"]
    words = words or FAULTS.get(name, name)
    return found(
        NAME,
        name,
        f"the endpoint {words}{said}: first in {first.label!r}{more}",
        severity=severity,  # type: ignore[arg-type]
        label=first.label,
        labels=[e.label for e in members[:16]],
        count=len(members),
    )
