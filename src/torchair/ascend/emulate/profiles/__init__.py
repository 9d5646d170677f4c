"""Profiles of the emulated device: what ran, and the files that the original's users know."""
