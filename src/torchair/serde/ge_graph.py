"""`GeGraph(...)`: a graph from a model message or its bytes, or an empty one."""

from __future__ import annotations

from typing import Any

from torchair.ge.graph import Graph
from torchair.operators import infer
from torchair.serde.proto import from_bytes


class _AnyGraph(type):
    def __instancecheck__(cls, other: object) -> bool:
        return isinstance(other, Graph)


class GeGraph(metaclass=_AnyGraph):
    """Makes a `Graph`; every `Graph` is an instance."""

    def __new__(  # type: ignore[misc]
        cls, model_def: Any = None, serialized_model_def: bytes | None = None,
        name: str | None = None,
    ) -> Graph:  # fmt: skip
        """The graph of a ModelDef message or of its bytes, or an empty one."""
        if model_def is not None and serialized_model_def is not None:
            raise AssertionError(
                "Unsupported init method: both model_def and serialized_model_def are specified. "
                "Give the message or its bytes, not both"
            )
        if model_def is not None:
            serialized_model_def = model_def.SerializeToString()
        if serialized_model_def is None:
            return Graph(name or "", infer)
        graph = from_bytes(serialized_model_def, infer)
        graph.name = graph.name if name is None else name
        return graph
