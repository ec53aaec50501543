"""The tabs of a run's screen, one a file."""
