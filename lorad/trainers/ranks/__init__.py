"""A trainer of several ranks, each a process: who starts them, what they are told, and the pool's end of it."""
