"""Rows that a package makes, in an interpreter that has it."""
