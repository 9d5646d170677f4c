"""Convolutions for the CPU."""
