"""The gateway: OpenAI's API over what is served, in a process of its own that survives the daemon.

It reads `table.json`, which the daemon replaces whole, and calls pools as drivers do.

A parameter is a field of `gateway/params.py`; what an answer looks like is `gateway/own/shapes.py`. A request
finds its version once, when it begins, and keeps it. `tests/gateway/` holds answers and refusals.
"""
