"""The truth: the whole composition in plain torch, to be read beside the papers. Imports nothing of day0check."""
