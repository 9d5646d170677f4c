"""Native code from plain descriptions: loop nests, matrix products, attention, convolution.

Knows nothing of graphs, operators or tensors: what comes in are sizes, strides and expressions.
"""
