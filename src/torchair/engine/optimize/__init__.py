"""Passes and rules that change a GE graph into one that runs faster, and what they know besides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torchair.codegen.target import Target
from torchair.engine.options import EngineOptions
from torchair.ge.graph import Node
from torchair.ge.rewrite import Match, Rule
from torchair.ge.signature import InputSource


def needed_by(nodes: Iterable[Node]) -> set[Node]:
    """Nodes that must have run before some, and those themselves."""
    found = set(nodes)
    stack = list(found)
    while stack:
        node = stack.pop()
        new = {*(v.node for v in node.values()), *node.control} - found
        found |= new
        stack += new
    return found


@dataclass
class GraphState:
    """Inputs by Data index, and which graph output updates which input."""

    inputs: list[InputSource] = field(default_factory=list)
    assigned: dict[int, int] = field(default_factory=dict)
    promised: frozenset[str] = frozenset()  # symbols that the layout of a result is told with
    topology: str = "DFS"
    switches: dict[str, bool] = field(default_factory=dict)
    dead_code: bool = True  # whether what nobody reads is removed
    native: bool = False  # whether generated code will run the graph
    quantised: int = 0  # rows of products with quantised weights that there are kernels for
    channels_last: bool = False  # whether a library convolves short floats best with channels last
    overlap: bool = False  # whether communication and computing shall overlap
    permits: Callable[[Rule, Match], bool] | None = None  # asked before each replacement
    matched: Counter[str] = field(default_factory=Counter)  # how often rules and patterns fitted
    replaced: Counter[str] = field(default_factory=Counter)  # and had an effect

    def follow(self, options: EngineOptions, target: Target | None) -> None:
        """Take over what the user asks for and what the target can do."""
        self.topology, self.switches = options.topology, options.switches
        self.dead_code = options.dead_code
        self.overlap = options.overlap and not options.single_stream
        self.native = target is not None
        self.quantised = 0 if target is None else target.quantised
        self.channels_last = target is not None and target.library_channels_last

    def note(self, name: str, done: bool) -> None:
        """Count a rule that fitted."""
        self.matched[name] += 1
        self.replaced[name] += done

    def fuses(self, name: str) -> bool:
        """Whether a pattern is switched on; without a word about it, ALL decides."""
        return self.switches.get(name, self.switches.get("ALL", True))
