"""A version evaluated by hand: a process beside the command, which reads the rows and runs user code.

It gets one request on stdin, asks the daemon for completions, and prints one result, which the client hands
in.

It samples and scores with the code of the driver, so that a figure here is the figure of the run; what is
asked and answered is in `protocol/evals.py`. `tests/end_to_end/test_evals.py` and
`tests/end_to_end/test_suites.py` hold it, `tests/cli/test_try_rewards.py` rewards on completions that exist.
"""
