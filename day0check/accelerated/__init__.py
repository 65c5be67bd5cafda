"""The fast path: our own engine, independent of `reference/` but for its configuration and weights."""
