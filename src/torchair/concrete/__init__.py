"""The strategies behind one interface: a GE graph in the engine, the same replayed by a GPU, or a
captured FX graph."""

from torchair.concrete.acl import AclConcreteGraph, ReplayedGraph, describe
from torchair.concrete.ge import ConcreteGraph, GeConcreteGraph

__all__ = [
    "AclConcreteGraph",
    "ConcreteGraph",
    "GeConcreteGraph",
    "ReplayedGraph",
    "describe",
]
