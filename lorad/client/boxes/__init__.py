"""Other boxes: which there are (`hosts.py`), and how the daemon of one is reached (`remote.py`)."""
