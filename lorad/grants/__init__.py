"""Grants: processes that hold what an outside scheduler gave a pool, one kind a module."""
