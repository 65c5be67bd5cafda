"""Settings in use against config.json itself, key by key, past the reader that the reference and our engine share.

A candidate and a reference that read the configuration with the same code are wrong together where that code is. Here
the raw keys of the released families are read once more, by a table that knows nothing of `reference.config`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from day0check.compare.checkpoint_parameters import same_setting
from day0check.compare.parameters import Recorded
from day0check.types import Measure

TEXT = "text_config"
SUFFIX = ".config"
BLOCK_NORMS = ("input", "post_attention", "final")


@dataclass(frozen=True)
class Rule:
    """`argument` of `operator` (at `sites`, where some are named) is the value of the first of `keys` that is there.

    A dot leads into an object. `axis`: the argument is a weight, and the value the length of that axis.
    """

    keys: tuple[str, ...]
    operator: str
    argument: str
    sites: tuple[str, ...] = ()
    axis: int | None = None


RULES = (
    Rule(("rms_norm_eps",), "norm.rms", "eps", BLOCK_NORMS),
    Rule(("rope_parameters.rope_theta", "rope_theta"), "rope.apply", "theta"),
    Rule(("num_experts_per_token", "num_experts_per_tok"), "moe.route", "k"),
    Rule(("routed_scaling_factor",), "moe.route", "scale"),
    Rule(("num_expert_group", "n_group"), "moe.route", "groups"),
    Rule(("topk_group",), "moe.route", "kept_groups"),
    Rule(("moe_renormalize", "norm_topk_prob"), "moe.route", "renormalise"),
    Rule(("moe_router_activation_func", "scoring_func"), "moe.scores", "scoring"),
    Rule(("num_experts", "n_routed_experts"), "moe.scores", "weight", axis=0),
    Rule(("hidden_size",), "moe.scores", "weight", axis=1),
    Rule(("index_topk",), "dsa.select", "k"),
    Rule(("kv_lora_rank",), "dsa.attention", "value_width"),
    Rule(("vocab_size",), "embed.tokens", "weight", axis=0),
    Rule(("hidden_size",), "embed.tokens", "weight", axis=1),
)


def compare_raw(config: Mapping[str, Any], recorded: Iterable[Recorded]) -> list[Measure]:
    """A measure for each tap and phase with an argument that a rule is about, tap "<tap>.config".

    `config`: the whole of config.json. Kinds of a preset that no release has (its part `day0check`) are left out.
    """
    text = config.get(TEXT) or config
    recorded = tuple(recorded)
    switched = bool(text.get("day0check") or config.get("day0check"))
    pooled = any(r.operator == "dsa.expand" for r in recorded)  # then k counts pools, not tokens
    found: dict[tuple[str, str], Measure] = {}
    for r in recorded:
        site = r.tap.partition(r.operator)[2].strip(".")
        own = [rule for rule in RULES if rule.operator == r.operator and (not rule.sites or site in rule.sites)]
        due = [(rule, *_value(text, rule.keys)) for rule in own]
        due = [d for d in due if d[1] and not (pooled and d[0].operator == "dsa.select")]
        for rule, key, value in [] if switched else due:
            at, ours = (f"{r.tap}{SUFFIX}", r.phase), _used(r, rule)
            same = ours is _ABSENT or same_setting(ours, _effective(text, rule, value))
            before = found.get(at)
            now = _measure(at[0], r, rule, "" if same else f"{rule.argument} is {ours}, {key} of config.json {value}")
            if before is None:
                found[at] = now
            else:
                kept = before if same or not before.passed else now
                found[at] = replace(kept, elements=before.elements + 1)
    return sorted(found.values(), key=lambda m: (m.order, m.tap, m.phase))


_ABSENT = object()


def _used(recorded: Recorded, rule: Rule) -> Any:
    if rule.axis is None:
        return recorded.settings.get(rule.argument, _ABSENT)
    weight = recorded.weights.get(rule.argument)
    return weight.shape[rule.axis] if weight is not None and len(weight.shape) > rule.axis else _ABSENT


def _value(text: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, Any]:
    """(key, value) of the first key that is there; ("", None) without one."""
    for key in keys:
        value: Any = text
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return key, value
    return "", None


def _effective(text: Mapping[str, Any], rule: Rule, value: Any) -> Any:
    """Groups of which all are kept are none."""
    if rule.argument in ("groups", "kept_groups"):
        groups, kept = (_value(text, keys)[1] for keys in (("num_expert_group", "n_group"), ("topk_group",)))
        return 1 if kept is None or groups is None or kept >= groups else value
    return value


def _measure(tap: str, recorded: Recorded, rule: Rule, wrong: str) -> Measure:
    return Measure(
        tap=tap,
        operator=recorded.operator,
        kind="exact",
        phase=recorded.phase,
        layer=recorded.layer,
        order=recorded.order,
        rows=0,
        elements=1,
        passed=not wrong,
        statistics={"different": float(bool(wrong))},
        limits={"different": 0.0},
        failing="different" if wrong else "",
        pattern=f"not as configured: {rule.argument}" if wrong else "",
        message=f"{wrong}; the reference reads it as the candidate does" if wrong else "",
    )


def beside(compared: list[Measure], raw: Iterable[Measure]) -> list[Measure]:
    """Both, without what `raw` accuses where `compared` accuses the same tap already."""
    accused = {(m.tap, m.phase) for m in compared if not m.passed}
    kept = [m for m in raw if m.passed or (m.tap.removesuffix(SUFFIX), m.phase) not in accused]
    return sorted([*compared, *kept], key=lambda m: (m.order, m.tap, m.phase))
