"""Agents, which are all that lorad has on another machine, and the pool's end of their connections.

An agent does what its pool asks on one control connection, and reports on its children; it keeps no state.

A message is a Struct of `nodes/messages.py`; a child there looks to a pool like one here
(`children/host.py`). An agent ends with its pool, by lease. `tests/nodes/` runs agents as processes of this
machine, kills them, and lies to both sides.
"""
