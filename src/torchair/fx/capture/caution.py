"""What to do when an analysis meets a graph it cannot handle: nothing, and say so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import fx

from torchair.log import logger

_Pass = Callable[..., None]


def cautious(fn: _Pass) -> _Pass:
    """A pass that is left out, with a warning, where a graph has something it cannot handle; what
    it had changed by then is undone."""

    @wraps(fn)
    def run(gm: fx.GraphModule, example_inputs: Any = (), config: Any = None) -> None:
        logger.debug("processing %s_pass", fn.__name__.removesuffix("_pass"))
        before = copy.deepcopy(gm.graph)
        try:
            fn(gm, example_inputs, config)
        except NotImplementedError:
            raise
        except Exception as error:
            gm.graph = before
            logger.warning("the pass %s is left out: %s", fn.__name__, error, exc_info=True)

    return run
