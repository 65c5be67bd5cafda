"""day0check: is this stack ready for this model?

What an operators file uses is here: `operator`, `operator.wrap`, `layout`, `prepare`.
Importing this package imports neither torch nor anything heavy.
"""

from day0check.probe.registry import layout, operator, prepare

__all__ = ["layout", "operator", "prepare"]
__version__ = "0.1.0"
