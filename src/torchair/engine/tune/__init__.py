"""Choosing among forms of kernels by measuring them."""
