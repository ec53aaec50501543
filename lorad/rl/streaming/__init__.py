"""Data that are read while a run trains: a source with a place in it, and blocks of its rows."""
