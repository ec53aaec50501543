"""Asking the pool for tokens: of completions, and of episodes turn by turn."""
