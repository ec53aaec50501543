"""HTTP within the machine: serves applications within bounds, and asks them."""
