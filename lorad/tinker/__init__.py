"""A door for the official Tinker client, and the lanes that train its models."""
