"""Views of a verdict: pure functions of `verdict.json`. Nothing in this room imports torch, and nothing decides."""
