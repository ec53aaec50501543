"""One file per verb that the daemon answers."""
