"""The strategies behind one interface: a GE graph in the engine, the same replayed by a GPU, or a
captured FX graph."""

from torchair.concrete.acl import AclConcreteGraph, describe
from torchair.concrete.base import ConcreteGraph
from torchair.concrete.ge import GeConcreteGraph
from torchair.concrete.replayed import ReplayedGraph

__all__ = [
    "AclConcreteGraph", "ConcreteGraph", "GeConcreteGraph", "ReplayedGraph", "describe",
]  # fmt: skip
