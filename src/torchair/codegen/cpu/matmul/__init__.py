"""Matrix products for the CPU."""
