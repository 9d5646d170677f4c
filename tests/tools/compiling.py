"""`torch.compile` with our backend, as most tests want it."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import torchair


def compiled(
    fn: Any,
    config: Any = None,
    *,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = True,
    **experimental: Any,
) -> Any:
    """The function as one graph of our backend; `experimental` are settings of
    `config.experimental_config`."""
    config = torchair.CompilerConfig() if config is None else config
    for name, value in experimental.items():
        setattr(config.experimental_config, name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the reminder of frozen_parameter
        warnings.simplefilter("ignore", DeprecationWarning)  # names of modes
        if mode is not None:
            config.mode = mode
        backend = torchair.get_npu_backend(compiler_config=config)
    return torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=fullgraph)


def compiled_afresh(fn: Any, *args: Any, **kwargs: Any) -> Any:
    """The same after Dynamo has forgotten what it compiled, so that no limit on recompilations of
    one piece of code is reached."""
    torch._dynamo.reset()
    return compiled(fn, *args, **kwargs)
