"""User code: the processes in which it runs, and its losses and advantages."""
