"""The two strategies behind one interface: a GE graph in the engine, or a captured graph."""

from torchair.concrete.acl import AclConcreteGraph
from torchair.concrete.base import ConcreteGraph
from torchair.concrete.ge import GeConcreteGraph

__all__ = ["AclConcreteGraph", "ConcreteGraph", "GeConcreteGraph"]
