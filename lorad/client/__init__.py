"""The client: `client.py` has a method for each request, `shapes.py` the answers, `transport.py` the HTTP."""
