"""`lorad tinker …`: the door for Tinker's client."""
