"""Faults that were found in public projects, named after their number in the catalogue."""
