"""Curves of runs: read steps, make series of them, and draw them."""
