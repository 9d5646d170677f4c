"""Fused units as native calls."""
