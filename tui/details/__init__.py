"""One screen for a table and what stands above it: the bill, a device, the nodes, a pool."""
