"""Evaluations of a run: its sets of held-out problems, their scores, and when they end it."""
