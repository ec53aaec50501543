"""A trainer of several ranks, each a process: its launcher, the calls of ranks, and the pool's side."""
