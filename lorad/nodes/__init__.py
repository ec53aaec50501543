"""Agents, which are all that lorad has on another machine, and the pool's end of their connections."""
