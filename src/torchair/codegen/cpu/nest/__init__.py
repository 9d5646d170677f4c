"""Loop nests as kernels for the CPU."""
