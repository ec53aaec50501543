"""The screen of a table and what stands above it, and its classes: the bill, a device, the nodes, a pool."""
