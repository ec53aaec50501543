"""Devices: which there are, who has locked them, and who computes on them."""
