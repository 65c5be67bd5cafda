"""The command line: options turned into calls. `--help`, `list`, `report`, `gate` and `baseline` never import torch."""

from day0check.cli.app import main

__all__ = ["main"]
