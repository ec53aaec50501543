"""Suites of behaviour that every backend passes: subclass one, say how to make a backend, and pytest does the rest."""
