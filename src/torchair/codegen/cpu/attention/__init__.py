"""Attention for the CPU: prefill and decode."""
