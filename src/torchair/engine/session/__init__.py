"""The engine's handle of one graph, `TorchNpuGraph`, and what it consists of.

graph        load, compile, run: what the user has in hands
loaded       the graph as it was handed over: its options, its device
variant      the graph compiled for one set of weights; makes and runs plans
plans        the cache of plans, one for each set of sizes
weights      which weights are packed, and the variant for those of a call
user_memory  memory that the user hands in
recording    plans that others run: a device that records, captures, files
inspection   profiles, steps observed one by one, a summary
"""

from torchair.engine.inspect.summary import GraphSummary
from torchair.engine.session.graph import TorchNpuGraph

__all__ = ["GraphSummary", "TorchNpuGraph"]
