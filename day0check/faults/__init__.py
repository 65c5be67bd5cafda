"""Known faults and legal variants of a candidate, one small file each. README.md says how a file is written.

The self-test runs them; the comparison knows none of them: an entry is an operators file or a backend of its own.
"""
