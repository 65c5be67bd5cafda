"""The image that was sent must reach the model, and no earlier one."""

from day0check.checks.endpoint.context import IMAGES as NAME
from day0check.checks.endpoint.context import IMAGES_QUESTION as QUESTION
from day0check.checks.endpoint.context import judge_images as judge

__all__ = ["NAME", "QUESTION", "judge"]
