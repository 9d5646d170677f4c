"""User passes before and after the built-in ones; they change the graph in place."""

from __future__ import annotations

import logging
from typing import Any

from torch import fx

from torchair.log import logger


def pre_pass(gm: fx.GraphModule, example_inputs: Any, config: Any) -> None:
    """Run the user's pass that comes before ours."""
    _run("post_grad_custom_pre_pass", gm, example_inputs, config)


def post_pass(gm: fx.GraphModule, example_inputs: Any, config: Any) -> None:
    """Run the user's pass that comes after ours."""
    _run("post_grad_custom_post_pass", gm, example_inputs, config)


def _run(name: str, gm: fx.GraphModule, example_inputs: Any, config: Any) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("before %s: %s", name, gm.graph)
    getattr(config, name).value(gm, example_inputs, config)
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("after %s: %s", name, gm.graph)
