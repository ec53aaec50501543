"""Kill -9 of everything, at random instants and at exact points, under several runs: see `__main__.py`."""
