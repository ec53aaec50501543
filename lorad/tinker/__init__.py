"""A door for the official Tinker client, and the lanes that train its models.

Requests come as the client's protobuf and JSON; each model is a run of the daemon's, and door and lane talk
by two logs.

A route is a function in `tinker/door/routes/`, a loss a row of `tinker/losses.py`. A request is in the log
before it is answered, so that a kill loses none. `tests/tinker/` types by hand what the client sends, and
kills either side; `tests/tinker/real/` has the client itself.
"""
