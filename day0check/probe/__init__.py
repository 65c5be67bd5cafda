"""What runs in the candidate's process: standard library and torch >= 2.1 only, Python >= 3.9.

Nothing here imports another room of day0check, so that this folder alone can be put beside a vendor's torch.
"""
