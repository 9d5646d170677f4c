"""Options of `torch.compile` as the original hands them on: among all keywords of a backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchair.configs.aliases import apply_options
from torchair.configs.compiler_config import CompilerConfig
from torchair.configs.flat import FlatConfig


def process_kwargs_options(
    config: CompilerConfig | FlatConfig, kwargs: Mapping[str, Any]
) -> None:
    """Set the options that `torch.compile(options=...)` gave to a backend."""
    options = kwargs.get("options") or {}
    if isinstance(config, FlatConfig):
        config.update(options)
    else:
        apply_options(config, options)
