"""Passes and rules that change a GE graph into one that runs faster."""
