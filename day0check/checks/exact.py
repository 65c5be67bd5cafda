"""Local replay of the operators of kind "exact"."""

from __future__ import annotations

from day0check.checks.evidence import Answer, Evidence
from day0check.checks.local import judge_kind

QUESTION = "Does every operator with a single right answer give exactly that answer?"


def judge(evidence: Evidence) -> Answer:
    return judge_kind("exact", evidence)
