"""Reproducers: the failing call of an operator, cut out of its run, with a script that needs nothing of ours."""
