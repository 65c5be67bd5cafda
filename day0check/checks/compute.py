"""Local replay of the operators of kind "compute"."""

from __future__ import annotations

from day0check.checks.evidence import Answer, Evidence
from day0check.checks.local import judge_kind

QUESTION = "Is every computed result within the rounding of the claimed profile, on the candidate's own inputs?"


def judge(evidence: Evidence) -> Answer:
    return judge_kind("compute", evidence)
