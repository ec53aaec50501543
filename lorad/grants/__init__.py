"""Grants: processes that hold what an outside scheduler gave a pool, one kind a module.

A grant gets a file with what a pool asks for, and writes down the nodes that it was given, for as long as it
lives.

Another scheduler is a program beside `grants/static.py` and `grants/ray.py`, the one file that imports Ray.
`tests/nodes/test_grants.py` holds what all kinds do, `tests/cluster/` what Ray does.
"""
