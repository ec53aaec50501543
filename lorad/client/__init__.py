"""The client of the daemon: a method for each request, and the words in which answers are told.

Its data are the daemon's answers, as the Structs of `lorad/records/`; it keeps nothing but the list of boxes.

A request is a method of `client/client.py`, a column of runs a row of `client/columns.py`; commands, screens
and the Python API all take them from here. Commands wait for its imports, so it has none of aiohttp.
`tests/daemon/api/` asks by it, `tests/cli/` holds the words, `tests/hosts/` what goes over ssh.
"""
