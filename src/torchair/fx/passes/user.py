"""What users add: passes before and after the built-in ones, and replacement patterns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from torchair.errors import GraphError
from torchair.fx.passes.streams import mark_streams, on_one_stream
from torchair.fx.source import source_line
from torchair.log import debug_print, logger
from torchair.passes import FxContext
from torchair.torch_private import inductor
from torchair.torch_private.fake import FakeTensorMode, detect_fake_mode

PatternState = dict[fx.Node, tuple[Any, ...]]


def pre_pass(gm: fx.GraphModule, context: FxContext) -> None:
    """Run the user's pass that comes before ours."""
    _run("post_grad_custom_pre_pass", gm, context)


def post_pass(gm: fx.GraphModule, context: FxContext) -> None:
    """Run the user's pass that comes after ours."""
    _run("post_grad_custom_post_pass", gm, context)


def _run(name: str, gm: fx.GraphModule, context: FxContext) -> None:
    """Passes change the graph in place; what they return is ignored, what they raise stops the
    compilation, and the graph they leave is checked."""
    user = getattr(context.config, name).value
    logger.debug("[%s] before [%s] execution, graph is %s", context.phase, name, gm.graph)
    before = {n: (n.target, n.args, n.kwargs) for n in gm.graph.nodes}
    results = _results(gm)
    try:
        user(gm, context.example_inputs, context.config)
    except Exception as e:
        e.add_note(f"raised by {name} ({_place(user)})")
        raise
    check = _PatternCheck(name, _place(user), gm, context.example_inputs)
    check.order()
    check.values(before)
    check.results(results)
    logger.debug("[%s] after [%s] execution, graph is %s", context.phase, name, gm.graph)


def _place(user: Callable[..., Any]) -> str:
    code = getattr(user, "__code__", None)
    name = getattr(user, "__qualname__", repr(user))
    return f"{name}, {code.co_filename}:{code.co_firstlineno}" if code else name


def _results(gm: fx.GraphModule) -> list[Any]:
    found: list[Any] = []
    fx.map_arg(gm.graph.output_node().args[0], lambda n: found.append(_seen(n.meta.get("val"))))
    return found


def _seen(value: Any) -> Any:
    """Type and dims of a fake tensor; of anything else nothing."""
    if isinstance(value, (list, tuple)):
        return [_seen(v) for v in value]
    if not isinstance(value, torch.Tensor):
        return None
    return value.dtype, [str(d) for d in value.shape]  # comparing symbols has effects


class _PatternCheck:
    """Whether what a pass left is a graph; errors name the pass and the node."""

    def __init__(self, name: str, place: str, gm: fx.GraphModule, example_inputs: Any) -> None:
        self.name, self.place, self.gm = name, place, gm
        mode = detect_fake_mode(example_inputs)
        self.mode: Any = mode or FakeTensorMode(allow_non_fake_inputs=True)
        self.inputs = dict(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=False))

    def _error(self, node: fx.Node | None, reason: str) -> GraphError:
        line = "" if node is None else source_line(node)
        line = f" ({line})" if line else ""
        return GraphError(
            f"pass {self.name} left an invalid graph: {reason}",
            node=None if node is None else f"{node.name} = {node.target}{line}",
            hint=f"look at the pass: {self.place}",
        )

    def order(self) -> None:
        """Every value is there before it is used, and targets can be called."""
        known: set[fx.Node] = set()
        for node in self.gm.graph.nodes:
            for source in node.all_input_nodes:
                if source not in known:
                    there = source in self.gm.graph.nodes
                    why = "is only computed later" if there else "is not in the graph any more"
                    raise self._error(node, f"it reads {source.name}, which {why}")
            if node.op == "call_function" and not callable(node.target):
                raise self._error(node, f"{node.target!r} cannot be called")
            known.add(node)
        if not any(n.op == "output" for n in known):
            raise self._error(None, "it has no output")
        try:
            self.gm.graph.lint()
        except Exception as e:
            raise self._error(None, str(e)) from e

    def values(self, before: PatternState) -> None:
        """Types and dims of what is new or changed, and of what follows from it."""
        changed: set[fx.Node] = set()
        for node in self.gm.graph.nodes:
            if node.op != "call_function" or getattr(node.target, "namespace", "") == "air":
                continue  # scopes and ordering marks compute nothing
            same = before.get(node) == (node.target, node.args, node.kwargs)
            if same and "val" in node.meta and not changed.intersection(node.all_input_nodes):
                continue
            old = _seen(node.meta.get("val"))
            node.meta["val"] = self._value(node)
            if _seen(node.meta["val"]) != old:
                changed.add(node)

    def _value(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._given)
        try:
            with self.mode:
                return node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception as e:
            raise self._error(node, f"{type(e).__name__}: {e}") from e

    def _given(self, node: fx.Node) -> Any:
        """The value of a node; without description an argument, or something the module holds."""
        if "val" in node.meta or node.op != "get_attr":
            return node.meta.get("val", self.inputs.get(node))
        return attrgetter(str(node.target))(self.gm)

    def results(self, expected: list[Any]) -> None:
        """The graph returns what callers were promised."""
        got = _results(self.gm)
        output = self.gm.graph.output_node()
        if len(got) != len(expected):
            raise self._error(output, f"it returns {len(got)} values instead of {len(expected)}")
        for k, (g, e) in enumerate(zip(got, expected, strict=True)):
            if g != e and None not in (g, e):
                raise self._error(output, f"result {k} is {_shown(g)} instead of {_shown(e)}")


def _shown(seen: Any) -> str:
    return f"{seen[0]}[{', '.join(seen[1])}]" if isinstance(seen, tuple) else str(seen)


# ---- replacement patterns, applied with torch's own pattern matcher
#
# It is part of inductor and takes a second to import: that happens at the first registration.


_NAME = "torchair_generic_pattern_pass"


@dataclass
class Replacement:
    """A registered pattern, and how often it was met and allowed in the present graph."""

    name: str
    check: Callable[[Any], bool] | None
    register: Callable[[Any, Callable[[Any], bool]], None]
    met: int = 0
    allowed: int = 0

    def allows(self, match: Any) -> bool:
        """Whether a match may be replaced; says why not."""
        self.met += 1
        if not on_one_stream(match):
            _say(f"{self.name} declined {_last(match)}: its nodes are on different streams")
        elif self.check is not None and not self.check(match):
            _say(f"{self.name} declined {_last(match)}: its extra_check said no")
        else:
            self.allowed += 1
            _say(f"{self.name} replaced {_last(match)}")
            return True
        return False


REGISTERED: list[Replacement] = []
WAITING: list[Replacement] = []
_matcher: list[Any] = []


def register_replacement(
    search_fn: Callable[..., Any],
    replace_fn: Callable[..., Any],
    example_inputs: Any,
    trace_fn: Callable[..., Any] | None = None,
    extra_check: Callable[[Any], bool] | None = None,
    search_fn_pattern: Any = None,
    scalar_workaround: dict[str, float | int] | None = None,
    skip_duplicates: bool = False,
) -> None:
    """Replace every match of `search_fn` by `replace_fn` in graphs compiled from now on.

    A match whose nodes lie on different streams is left alone; then `extra_check` decides.
    """

    def add(matcher: Any, allows: Callable[[Any], bool]) -> None:
        pm = inductor.pattern_matcher
        pm.register_replacement(
            search_fn,
            replace_fn,
            example_inputs,
            trace_fn or pm.fwd_only,
            matcher,
            extra_check=allows,
            search_fn_pattern=search_fn_pattern,
            scalar_workaround=scalar_workaround,
            skip_duplicates=skip_duplicates,
        )

    name = getattr(search_fn, "__qualname__", repr(search_fn))
    WAITING.append(Replacement(name, extra_check, add))


def apply_pattern_passes(gm: fx.GraphModule) -> None:
    """Apply the registered replacements; without any this costs nothing."""
    if not WAITING and not REGISTERED:
        return
    if not _matcher:
        _matcher.append(inductor.pattern_matcher.PatternMatcherPass(pass_name=_NAME))
    while WAITING:
        new = WAITING.pop(0)
        new.register(_matcher[0], new.allows)
        REGISTERED.append(new)
    for replacement in REGISTERED:
        replacement.met = replacement.allowed = 0
    mark_streams(gm.graph)
    _matcher[0].apply(gm.graph)
    for replacement in REGISTERED:
        if not replacement.met:
            _say(f"{replacement.name} found nothing like itself")


def _last(match: Any) -> str:
    return match.nodes[-1].name if match.nodes else "nothing"


def _say(text: str) -> None:
    debug_print(3, f"torchair pattern {text}")
    logger.debug("pattern %s", text)
