"""Local replay of the operators of kind "choose"."""

from __future__ import annotations

from day0check.checks.evidence import Answer, Evidence
from day0check.checks.local import judge_kind

QUESTION = "Is every selection and every route the best by the candidate's own scores, and legal?"


def judge(evidence: Evidence) -> Answer:
    return judge_kind("choose", evidence)
