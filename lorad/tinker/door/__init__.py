"""The door: an HTTP server that the official `tinker` client takes for Tinker."""
