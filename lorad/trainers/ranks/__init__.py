"""A trainer of several ranks, each a process: its launcher, the calls that ranks receive, and the pool's end
of it.
"""
