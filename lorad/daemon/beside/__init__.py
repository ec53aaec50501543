"""Processes beside the runs: how any of them is kept up, those that write to experiment
loggers, and those that notify."""
