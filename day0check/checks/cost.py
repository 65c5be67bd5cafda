"""Memory, work and time of every operator over length, batch and layers, against the cost models of the contracts."""

from __future__ import annotations

from day0check.checks.evidence import Answer, Evidence, answer, answer_from
from day0check.compare.cost import Costs, judge_costs
from day0check.types import Finding, Measure, finding_id

QUESTION = "Do memory, work and time grow with length and batch as the operators' cost models say?"
NAME = "cost"


def judge(evidence: Evidence) -> Answer:
    if evidence.costs is None:
        reason = "the sweep over lengths was not made" if evidence.finished else "the candidate did not finish the case"
        return answer(NAME, evidence, "not_run", reason)
    if evidence.costs.recompiled:
        return answer(NAME, evidence, "failed", recompilations(evidence.costs), (_recompiled(evidence.costs),))
    if evidence.costs.missing:
        return answer(NAME, evidence, "not_run", evidence.costs.missing)
    measures = (*judge_costs(evidence.costs), *index_keys_written(evidence.measures))
    return answer_from(NAME, measures, evidence, nothing="no operator of the candidate has a cost model")


def recompilations(costs: Costs) -> str:
    """Where graphs were compiled anew, in words."""
    graphs = sum(count for *_, count in costs.recompiled)
    sweep, size, _ = costs.recompiled[0]
    return f"{graphs} graphs were compiled anew after warm-up, the first at {sweep} {size}"


def _recompiled(costs: Costs) -> Finding:
    """Shapes that should not matter made torch.compile start anew: whoever meets a new one waits for a compiler."""
    return Finding(
        id=finding_id(NAME, None, "", None, "recompiled"),
        severity="blocker",
        check=NAME,
        operator=None,
        message=recompilations(costs),
        value=float(sum(count for *_, count in costs.recompiled)),
        limit=0.0,
        stack_layer="compiler",
        evidence={"points": [list(point) for point in costs.recompiled]},
    )


def index_keys_written(measures: tuple[Measure, ...]) -> tuple[Measure, ...]:
    """In decode, a layer with an index writes one key for each row that it selects for: an index that is written anew
    costs a step the whole context. Pools close only every few tokens, and may be fewer."""
    decode = {m.tap: m for m in measures if m.phase == "decode"}
    found = []
    for tap, written in decode.items():
        if written.operator != "index.write" or written.layer is None:
            continue
        selected = decode.get(tap.replace("index.write", "dsa.select"))
        if selected is None:
            continue
        passed = written.rows <= selected.rows
        found.append(
            Measure(
                tap=tap,
                operator=written.operator,
                kind="move",
                phase="decode",
                layer=written.layer,
                order=written.order,
                rows=written.rows,
                elements=written.elements,
                passed=passed,
                statistics={"keys_per_row": written.rows / max(1, selected.rows)},
                limits={"keys_per_row": 1.0},
                failing="" if passed else "keys_per_row",
                pattern="" if passed else "keys written anew",
                message="" if passed else f"writes {written.rows} index keys in decode for {selected.rows} rows",
            )
        )
    return tuple(found)
