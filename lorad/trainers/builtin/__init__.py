"""The builtin trainer: torch alone, one process, one device, any number of slots on one frozen base."""
