"""Runs as one HTML page that loads nothing: what `lorad report` writes."""
