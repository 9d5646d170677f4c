"""Everything of torch that is not public, by subject; no other package uses private names of torch.

Each module has a table (`NAMES`) of what it takes from torch, under a public name: the versions of
torch on which it was seen, and what happens without it. Operators such as `torch.ops.aten._softmax`
are no private names: their schemas are what graphs are written in.
"""
