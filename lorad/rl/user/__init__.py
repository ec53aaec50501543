"""Losses and advantages of the user's: what they are given and may return."""
