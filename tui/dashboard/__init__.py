"""The dashboard: every run, pool, device and event at a glance."""
