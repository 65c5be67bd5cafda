"""Measurements of the embedded engine, printed by `make bench`. Not part of the package."""
