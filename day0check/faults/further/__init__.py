"""Further faults of our own: small, or of a kind that no public report describes yet."""
