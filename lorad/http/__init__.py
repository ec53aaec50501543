"""HTTP within the machine: applications that are served within bounds, and what asks them."""
