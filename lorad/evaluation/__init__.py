"""A version evaluated by hand: a process beside the command, which reads the rows and runs user code."""
