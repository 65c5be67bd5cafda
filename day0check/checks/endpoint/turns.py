"""Earlier turns must reach the model."""

from day0check.checks.endpoint.context import TURNS as NAME
from day0check.checks.endpoint.context import TURNS_QUESTION as QUESTION
from day0check.checks.endpoint.context import judge_turns as judge

__all__ = ["NAME", "QUESTION", "judge"]
