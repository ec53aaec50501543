"""Rows that are ready to be trained on, out of memory."""
