"""How the dims of a value run along the axes of a loop nest: what fusion decides by."""

from __future__ import annotations

from collections.abc import Sequence

from torchair.engine.lower import Group, Space, whole
from torchair.ge.graph import Node, Value
from torchair.operators.core import has_loops, loops_of


def splits_rows(base: Value, view: Value) -> bool:
    """Whether a view only gives the rows of a matrix product other leading dims."""
    a, b = base.shape or (), view.shape or ()
    return len(a) == 2 and len(b) >= 1 and view.node.type == "Reshape" and a[-1] == b[-1]


def space_through(base: Value, space: Space, view: Value) -> Space | None:
    """The space of a view that only adds or removes dims of size 1."""
    before = [(n, s) for n, s in zip(base.shape or (), space, strict=True) if n != 1]
    after = [n for n in view.shape or () if n != 1]
    if [n for n, _ in before] != after or view.node.type == "Transpose":
        return None
    axes = iter(s for _, s in before)
    return tuple(None if n == 1 else next(axes) for n in view.shape or ())


def aligned(space: Space, place: Space) -> bool:
    """Whether a value of this space is broadcast to a place along the axes it runs along."""
    tail = place[len(place) - len(space) :]
    return len(space) <= len(place) and all(
        a is None or a == b for a, b in zip(space, tail, strict=True)
    )


def epilogue_spaces(
    group: Group, views: Sequence[Node], node: Node, seen: dict[Value, Space]
) -> dict[Value, Space] | str:
    """What may be done to the results of a product: maps over exactly its own dims."""
    first = next(iter(seen))
    started = any(n not in views for n in group.nodes)
    shape = group.shape if started else first.shape
    made = group.given[0].shape
    if (shape or ())[-1:] != (made or ())[-1:]:  # vectors of results run along the last dim
        return f"{node.type} runs over other axes"
    if any(s != whole(v) or v.shape != shape for v, s in seen.items()):
        return f"{node.type} runs over other axes"
    if any(out.shape != shape for out in node.outputs):
        return f"{node.type} runs over other axes"
    if all(_needs_row(u) for out in node.outputs for u in out.users()):
        return f"what reads {node.type} needs a whole row"
    return {out: whole(out) for out in node.outputs}


def _needs_row(node: Node) -> bool:
    return has_loops(node.type) and loops_of(node.type).kind == "reduce"


def map_space(group: Group, out: Value, seen: dict[Value, Space]) -> Space | None:
    """How the dims of an elementwise result run along the axes of the group, None if they
    cannot."""
    shape, dims = group.shape, out.shape or ()
    entries: list[int | None] = []
    for i, n in enumerate(dims):
        if n == 1:
            entries.append(None)
            continue
        axis = _axis_of(i - len(dims), seen)
        if axis is None and len(dims) == len(shape):
            axis = i
        if axis is None or axis < 0 or shape[axis] != n or axis in entries:
            return None
        entries.append(axis)
    missing = {a for a, n in enumerate(shape) if n != 1} - set(entries)
    return tuple(entries) if missing <= group.reduced else None


def _axis_of(position: int, seen: dict[Value, Space]) -> int | None:
    """The axis along which operands run at a dim counted from the end; -1 if they disagree."""
    axes = {
        s[position] for s in seen.values() if len(s) >= -position and s[position] is not None
    }
    if not axes:
        return None
    return axes.pop() if len(axes) == 1 else -1
