"""Earlier turns must reach the model."""

from day0check.checks.endpoint_context import TURNS as NAME
from day0check.checks.endpoint_context import TURNS_QUESTION as QUESTION
from day0check.checks.endpoint_context import judge_turns as judge

__all__ = ["NAME", "QUESTION", "judge"]
