"""The tightest legal form that a result is consistent with: a looser one than claimed explains a failure, a tighter one
that passes should be claimed, since slack hides faults."""

from __future__ import annotations

from dataclasses import replace

import torch

from day0check.compare.compute import judge_compute
from day0check.compare.judgement import Judgement
from day0check.compare.replay import Replay
from day0check.contracts.profiles import Profile, other_forms, profile_with_form

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
    """The judgements of a compute call under the claimed profile, told which other form of the operator fits better.

    Costs nothing where the result passes and uses its claim: other forms are tried only for a failure, or for a ratio
    of the whole below SLACK. An error that is one factor or one parameter is no rounding, however wide a claim is.
    """
    failed = any(not j.passed for j in judged)
    if any(j.failing.startswith(("slope", "direction")) for j in judged):
        return judged
    wholes = [j.statistics["whole"] for j in judged if "whole" in j.limits]
    if not failed and (not wholes or max(wholes) >= SLACK):
        return judged
    contract = replay.contract
    for form, other in other_forms(profile, contract, looser=failed):
        again = judge_compute(replay, results, other, seed=seed, keep=keep, thorough=True)
        if not all(j.passed for j in again):
            continue
        name = profile_with_form(profile.act_dtype, contract.name, form)
        of = f" of profile {name}" if name else ""
        if failed:
            return [replace(j, message=f"{j.message}; consistent with the looser form '{form}'{of}") for j in judged]
        text = f"the claimed roundings hide faults: consistent with the tighter form '{form}'{of}, claim it"
        return [replace(j, message=text) for j in judged]
    return judged
