"""The full-screen terminal interface: the dashboard, a screen for each run, and the line behind `:`.

Its data are the daemon's answers, which `tui/feed.py` reads at most twice a second, in threads.

A key or command is a row of `tui/actions/table.py`; a screen has a folder, and beside it, without Textual,
what it shows. What it does is asked of the daemon as commands ask it. `tests/tui/` holds screens, keys and
pictures.
"""
