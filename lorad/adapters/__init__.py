"""Adapters outside of any backend: names, PEFT files, validation, version directories."""
