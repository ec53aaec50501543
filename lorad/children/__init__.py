"""Processes of a pool that end with it, whatever dies first."""
