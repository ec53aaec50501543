"""Other boxes of the user: `hosts.py` reads which there are, `remote.py` reaches their daemons by ssh."""
