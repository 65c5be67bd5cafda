"""Each parameter: honoured, refused, or taken and silently ignored. Support is never inferred from status 200."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from day0check.checks.endpoint.answer import answered, found
from day0check.checks.endpoint.compare import full_text, shown
from day0check.checks.evidence import Answer
from day0check.load.observed import Observed
from day0check.load.records import Exchange

QUESTION = "Does the endpoint honour or refuse each parameter, and refuse values that make no sense?"
NAME = "endpoint.parameters"

State = Literal["honoured", "refused", "ignored", "wrong", "undetermined", "failed", "not_asked"]
EXTENSIONS = ("ignore_eos", "return_token_ids", "prompt_logprobs")  # OpenAI has none of these: ignoring one is no fault
OPERATORS = {"stop": "serve.stop", "stop_stream": "serve.stop", "logprobs": "serve.logprobs"}
SHOWN = {"stop_stream": "stop in a stream"}
BEST_EFFORT = ("seed",)
CHANCE = 1e-6  # a draw that looks greedy is a coincidence unless it is less likely than this
BAD = {
    "temperature": "a temperature of -3",
    "max_tokens": "max_tokens of -1",
    "model": "a model that it does not serve",
    "prompt": "a request without a prompt",
    "json": "a body that is no JSON",
}


@dataclass(frozen=True)
class Parameter:
    state: State
    sentence: str = ""
    label: str = ""


def classify(observed: Observed) -> dict[str, Parameter]:
    """The state of each parameter that was asked about, by name."""
    rules = {
        "max_tokens": _max_tokens,
        "stop": _stop,
        "stop_stream": _stop,
        "temperature": _temperature,
        "seed": _seed,
        "n": _n,
        "logprobs": _logprobs,
        "echo": _echo,
        "token_ids": _accepted,
        "ignore_eos": _accepted,
        "return_token_ids": _returns_ids,
        "prompt_logprobs": _prompt_logprobs,
    }
    first = {"temperature": "temperature/0", "seed": "seed/7/0"}
    states: dict[str, Parameter] = {}
    for name, rule in rules.items():
        exchange = observed.get(first.get(name, name))
        if exchange is None:
            continue
        if exchange.refused:
            states[name] = Parameter("refused", exchange.answer.error, exchange.label)
        elif not exchange.good:
            states[name] = Parameter("failed", exchange.answer.error or exchange.reply.detail, exchange.label)
        else:
            states[name] = rule(observed, exchange)
    return states


def judge(observed: Observed) -> Answer:
    """Ignored and wrongly applied parameters are findings, and so are senseless values that are answered."""
    states = classify(observed)
    findings = []
    for name, p in states.items():
        if p.state in ("ignored", "wrong") and name not in EXTENSIONS:
            words = "accepts {} and ignores it" if p.state == "ignored" else "applies {} wrongly"
            findings.append(
                found(
                    NAME,
                    f"{name} {p.state}",
                    f"the endpoint {words.format(SHOWN.get(name, name))}: {p.sentence}",
                    severity="warning" if name in BEST_EFFORT else "blocker",
                    operator=OPERATORS.get(name),
                    label=p.label,
                )
            )
    findings += _bad_values(observed)
    counted = {
        state: sum(p.state == state for p in states.values()) for state in ("honoured", "refused", "undetermined")
    }
    summary = ", ".join(f"{n} {state}" for state, n in counted.items() if n)
    not_run = "" if "max_tokens" in states else "the parameters were not asked about"
    return answered(NAME, findings, summary, not_run=not_run)


def _bad_values(observed: Observed) -> list:
    findings = []
    for name, what in BAD.items():
        exchange = observed.get(f"bad/{name}")
        if exchange is None or exchange.refused:
            continue
        status = exchange.reply.status
        if exchange.reply.fault:
            text, severity = f"{what} gets no answer ({exchange.reply.fault}) instead of a 4xx", "blocker"
        elif status >= 500:
            text, severity = f"{what} is answered with {status}, a fault of the server, instead of a 4xx", "warning"
        else:
            text, severity = f"{what} is answered with status {status} instead of a 4xx", "warning"
        kind = "fault" if exchange.reply.fault else "5xx" if status >= 500 else "accepted"
        findings.append(found(NAME, f"bad {name} {kind}", text, severity=severity, label=exchange.label))
    return findings


# --------------------------------------------------------------------------------------- one rule for each parameter


def _max_tokens(observed: Observed, exchange: Exchange) -> Parameter:
    plain, limit = observed.get("plain"), exchange.asked["max_tokens"]
    came = len(exchange.answer.token_ids) or len(exchange.answer.tokens)  # usage may lie; its own check says so
    usage = exchange.answer.usage
    count = came or (usage.completion_tokens if usage else 0)
    if count > limit:
        return Parameter("ignored", f"{count} tokens came where {limit} were allowed", exchange.label)
    if not count:
        if plain is None or not plain.good or full_text(plain.answer) == "":
            return Parameter("undetermined")
        if full_text(plain.answer) == full_text(exchange.answer):
            return Parameter("ignored", f"the answer is as long as with {plain.asked['max_tokens']}", exchange.label)
    return Parameter("honoured")


def _stop(observed: Observed, exchange: Exchange) -> Parameter:
    plain = observed.get("plain")
    stop, text = exchange.asked["stop"][0], exchange.answer.text
    if plain is None or not plain.good:
        return Parameter("undetermined")
    whole = plain.answer.text
    if text == whole[: whole.find(stop)]:
        if exchange.answer.finish != "stop":
            return Parameter("wrong", f"the finish reason is {exchange.answer.finish!r}, not 'stop'", exchange.label)
        return Parameter("honoured")
    if text == whole:
        return Parameter("ignored", f"the text goes on after {stop!a}", exchange.label)
    if not whole.startswith(text[: whole.find(stop)]):
        return Parameter("undetermined")  # another answer altogether: the check of repeats says so
    return Parameter(
        "wrong", f"asked to stop at {stop!a}, the text ends with {shown(text, max(0, len(text) - 12))}", exchange.label
    )


def _temperature(observed: Observed, exchange: Exchange) -> Parameter:
    plain = observed.get("plain")
    drawn = [e for e in observed.under("temperature").values() if e.good]
    if plain is None or not plain.good:
        return Parameter("undetermined")
    if any(full_text(e.answer) != full_text(plain.answer) for e in drawn):
        return Parameter("honoured")
    logprobs = plain.answer.logprobs
    if logprobs is not None and len(drawn) * sum(logprobs) < math.log(CHANCE):
        return Parameter("ignored", f"{len(drawn)} draws at temperature 1 are the greedy answer", exchange.label)
    return Parameter("undetermined")


def _seed(observed: Observed, exchange: Exchange) -> Parameter:
    same, other = observed.get("seed/7/1"), observed.get("seed/8/0")
    if same is None or not same.good:
        return Parameter("undetermined")
    if full_text(same.answer) != full_text(exchange.answer):
        return Parameter("ignored", "the same seed gives two answers", same.label)
    if other is None or not other.good or full_text(other.answer) == full_text(exchange.answer):
        return Parameter("undetermined")
    return Parameter("honoured")


def _n(observed: Observed, exchange: Exchange) -> Parameter:
    got, asked = exchange.answer.choices, exchange.asked["n"]
    if got == asked:
        return Parameter("honoured")
    return Parameter("ignored", f"{asked} choices were asked for, {got} came", exchange.label)


def _logprobs(observed: Observed, exchange: Exchange) -> Parameter:
    if exchange.answer.logprobs is not None:
        return Parameter("honoured")
    return Parameter("ignored", "status 200 without log-probabilities", exchange.label)


def _echo(observed: Observed, exchange: Exchange) -> Parameter:
    if exchange.asked["prompt"] in exchange.answer.text:
        return Parameter("honoured")
    return Parameter("ignored", "the prompt is not in the answer", exchange.label)


def _accepted(observed: Observed, exchange: Exchange) -> Parameter:
    return Parameter("honoured")


def _returns_ids(observed: Observed, exchange: Exchange) -> Parameter:
    return Parameter("honoured" if exchange.answer.token_ids else "ignored")


def _prompt_logprobs(observed: Observed, exchange: Exchange) -> Parameter:
    return Parameter("honoured" if exchange.answer.prompt_logprobs else "ignored")
