"""Runs that wait: which pool takes which run, who makes room, and who is queued again."""
