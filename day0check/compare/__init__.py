"""How close a candidate is to the reference, in units of the noise that its claimed precision must have."""
