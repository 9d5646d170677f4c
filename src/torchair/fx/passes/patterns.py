"""Replacement patterns registered by users, applied with torch's own pattern matcher.

The matcher is part of inductor and takes a second to import: that happens when somebody registers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from torchair.flags import Flags
from torchair.fx.streams import mark_streams, on_one_stream
from torchair.log import logger

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


_registered: list[Replacement] = []
_waiting: list[Replacement] = []
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
        from torch._inductor import pattern_matcher as pm

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
    _waiting.append(Replacement(name, extra_check, add))


def apply_pattern_passes(gm: fx.GraphModule, example_inputs: Any, config: Any) -> None:
    """Apply the registered replacements; without any this costs nothing."""
    if not _waiting and not _registered:
        return
    if not _matcher:
        from torch._inductor.pattern_matcher import PatternMatcherPass

        _matcher.append(PatternMatcherPass(pass_name=_NAME))
    while _waiting:
        new = _waiting.pop(0)
        new.register(_matcher[0], new.allows)
        _registered.append(new)
    for replacement in _registered:
        replacement.met = replacement.allowed = 0
    mark_streams(gm.graph)
    _matcher[0].apply(gm.graph)
    for replacement in _registered:
        if not replacement.met:
            _say(f"{replacement.name} found nothing like itself")


def _last(match: Any) -> str:
    return match.nodes[-1].name if match.nodes else "nothing"


def _say(text: str) -> None:
    if Flags.read().debug >= 3:
        print(f"torchair pattern {text}")
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("pattern %s", text)
