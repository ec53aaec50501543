"""What trainers and engines cannot do: a row for each limit, read before a run starts and where it starts.

A row judges a `BackendSetup`, which preflight, pools and ranks fill as far as they know it; nothing is read
here.

A limit is a row of `limits/of_trainers.py` or `limits/of_engines.py`, with its words and a hint, and a case
in `tests/preflight/test_limits.py`; the docs' tables are made from the rows.
"""
