"""The supervisor: it places, starts, adopts and stops pools and drivers, and answers requests.

Its data are the database, of which it is the one writer, the journals of runs, and what processes leave in
their directories; a pass of the loop begins from these alone.

A verb of the loop is a row of `daemon/reconcile.py`, a handler a function of its route's name in
`daemon/api/verbs/`, a service a row of `daemon/services/table.py`. It may die at any line: what it does is
journaled before it takes effect. `tests/daemon/` holds each room of it, `tests/faults/` and
`tests/end_to_end/` the deaths.
"""
