"""Processes beside the runs: how any of them is kept up, and those that write to experiment loggers."""
