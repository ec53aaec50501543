"""Asking the pool for tokens: for completions, and for episodes turn by turn."""
