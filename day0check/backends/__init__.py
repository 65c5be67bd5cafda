"""One file per way to run a model. `base.py` says what a backend is."""
