"""Processes under a guard, which end with the process that started them, whatever dies first."""
