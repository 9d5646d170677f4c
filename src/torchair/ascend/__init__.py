"""Ascend beside the core: the `npu` library, its operators in graphs, the emulated device, names of
older versions. Nothing of the core imports this; `torchair.extensions` loads it when a graph, a
script or an old import asks for it."""
