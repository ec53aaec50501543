"""The supervisor: it places, starts, adopts and stops pools and drivers, and answers requests."""
