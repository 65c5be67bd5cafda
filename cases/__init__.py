"""The cases that day0check ships: TOML files by subject, and under `data/` the texts that they read."""
