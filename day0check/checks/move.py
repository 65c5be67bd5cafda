"""Local replay of the operators of kind "move"."""

from __future__ import annotations

from day0check.checks.evidence import Answer, Evidence
from day0check.checks.local import judge_kind

QUESTION = "Does every operator that moves data deliver the bytes it was given, to the right place?"


def judge(evidence: Evidence) -> Answer:
    return judge_kind("move", evidence)
