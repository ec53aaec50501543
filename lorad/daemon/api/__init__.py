"""The daemon's HTTP API: who asks, what for, and the shapes of the answers."""
