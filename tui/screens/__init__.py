"""Screens, each in a file of its own."""
