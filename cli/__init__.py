"""The command line. It talks to the daemon through `lorad.client` and to nothing else.

Its data are what was typed, and the daemon's answers; data go to stdout, everything else to stderr.

A command is a function in a file of `cli/commands/` and its line in `cli/app.py`, which imports that file
alone. The JSON of a command is the record as it is. `tests/cli/test_tables.py` holds what is printed,
`tests/test_docs.py` the help.
"""
