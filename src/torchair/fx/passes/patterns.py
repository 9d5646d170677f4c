"""Replacement patterns registered by users, applied with torch's own pattern matcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from torchair.fx.streams import mark_streams, on_one_stream

_pending: list[Callable[[Any], None]] = []
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

    def add(matcher: Any) -> None:
        from torch._inductor import pattern_matcher as pm

        pm.register_replacement(
            search_fn,
            replace_fn,
            example_inputs,
            trace_fn or pm.fwd_only,
            matcher,
            extra_check=lambda match: on_one_stream(match) and _allowed(extra_check, match),
            search_fn_pattern=search_fn_pattern,
            scalar_workaround=scalar_workaround,
            skip_duplicates=skip_duplicates,
        )

    _pending.append(add)


def _allowed(extra_check: Callable[[Any], bool] | None, match: Any) -> bool:
    return True if extra_check is None else bool(extra_check(match))


def apply_pattern_passes(gm: fx.GraphModule, example_inputs: Any, config: Any) -> None:
    """Apply the registered replacements; without any this costs nothing."""
    if not _pending and not _matcher:
        return
    if not _matcher:
        from torch._inductor.pattern_matcher import PatternMatcherPass

        _matcher.append(PatternMatcherPass(pass_name="torchair_generic_pattern_pass"))
    while _pending:
        _pending.pop(0)(_matcher[0])
    mark_streams(gm.graph)
    _matcher[0].apply(gm.graph)
