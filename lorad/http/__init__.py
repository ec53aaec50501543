"""HTTP within the machine: serves applications within bounds, and asks them.

Its data are connections: the peer's uid by the kernel, deadlines and counts by `http/bounded.py`.

Daemon, gateway and door are applications of `http/serve.py`, and none of them opens a socket itself.
`tests/protocol/test_bounds.py` and `tests/protocol/test_listeners.py` hold the bounds,
`tests/gateway/test_front.py` the front of a shared home.
"""
