"""The audit of a checkpoint before anything runs on it."""

from day0check.audit.inspection import NAME, OPERATOR, Audited, audit, inspect

__all__ = ["NAME", "OPERATOR", "Audited", "audit", "inspect"]
