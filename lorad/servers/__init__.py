"""What lorad knows of each kind of server that samples: a file for each, which imports and starts nothing.

The facts were seen on the version that each file names.

Another server is a file with its `ServerKind` and a row of `servers/table.py`; how it is spoken to is its
dialect in `engines/`. `tests/preflight/test_servers.py` holds the refusals, `tests/engines/real/` the facts.
"""
