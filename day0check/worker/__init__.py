"""The process that runs a candidate or the reference, and (`process.py`) the runner's side of it."""
