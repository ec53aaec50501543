"""Gated delta nets: layers whose tokens leave a state of one size in place of keys and values."""
