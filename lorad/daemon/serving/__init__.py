"""Versions that are served: keep their pools and gateways up, and keep the versions loaded."""
