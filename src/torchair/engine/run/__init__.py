"""Plans bound to memory, and calling them."""
