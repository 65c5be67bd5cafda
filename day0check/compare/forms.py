"""The tightest legal form that a result is consistent with: a looser one than claimed explains a failure, a tighter one
that passes should be claimed, since slack hides faults."""

from __future__ import annotations

from dataclasses import replace

import torch

from day0check.compare.compute import judge_compute
from day0check.compare.judgement import Judgement
from day0check.compare.replay import Replay
from day0check.contracts.profiles import LOOSER, MISFIT, Profile, other_forms, profile_with_form

SLACK = 0.5  # ratio of the whole below which the claimed roundings are more than what happens


def beside_other_forms(
    judged: list[Judgement],
    replay: Replay,
    results: tuple[torch.Tensor, ...],
    profile: Profile,
    *,
    seed: int,
    keep: torch.Tensor | None = None,
) -> list[Judgement]:
    """The judgements of a compute call under the claimed profile, told which other form of the operator fits.

    A failure is tried under looser forms, which explain it and excuse nothing. A result that passes is tried under
    tighter ones: whether it fits each is a statistic without a limit, and where its ratio of the whole is below SLACK
    the form to claim is told. An error that is one factor or one parameter is no rounding, however wide a claim is.
    """
    failed = any(not j.passed for j in judged)
    if any(j.failing.startswith(("slope", "direction")) for j in judged):
        return judged
    fits: dict[str, bool] = {}
    for form, other in other_forms(profile, replay.contract, looser=failed):
        if other.inputs != profile.inputs and "x_scale" in replay.arguments:
            continue  # the candidate's own codes are no noise
        again = judge_compute(replay, results, other, seed=seed, keep=keep, thorough=failed)
        fits[form] = all(j.passed for j in again)
        if failed and fits[form]:
            named = _named(profile, replay, form)
            return [_explained(j, form, f"; consistent with the looser {named}") for j in judged]
    if failed or not fits:
        return judged
    misfits = {f"{MISFIT}{form}": float(not fit) for form, fit in fits.items()}
    judged = [replace(j, statistics=j.statistics | misfits) for j in judged]
    wholes = [j.statistics["whole"] for j in judged if "whole" in j.limits]
    tightest = next((form for form, fit in fits.items() if fit), "")
    if not tightest or not wholes or max(wholes) >= SLACK:
        return judged
    named = _named(profile, replay, tightest)
    return [
        replace(j, message=f"the claimed roundings hide faults: consistent with the tighter {named}, claim it")
        for j in judged
    ]


def _explained(judgement: Judgement, form: str, words: str) -> Judgement:
    statistics = judgement.statistics | {f"{LOOSER}{form}": 0.0}
    return replace(judgement, message=f"{judgement.message}{words}", statistics=statistics)


def _named(profile: Profile, replay: Replay, form: str) -> str:
    name = profile_with_form(profile, replay.contract.name, form)
    return f"form '{form}'" + (f" of profile {name}" if name else "")
