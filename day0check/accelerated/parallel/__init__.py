"""Tensor and expert parallel ranks: how weights, rows and experts are cut, and how the pieces come together again."""
