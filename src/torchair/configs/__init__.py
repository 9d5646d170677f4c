"""The configuration package: the tree of options a user sets and the snapshot the compiler reads.

Layer 1: imports only the layer below and the standard library, never torch.
"""
