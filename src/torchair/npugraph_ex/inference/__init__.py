"""Compiled methods that outlive their process, under the flat options of npugraph_ex."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torchair.configs.compiler_config import FlatConfig
from torchair.npugraph_ex.backend import config_for_cache, tree_of

if TYPE_CHECKING:
    from torchair.deploy.cached import CachedMethod

__all__ = ["cache_compile", "readable_cache"]


def cache_compile(
    func: Callable[..., Any],
    *,
    config: FlatConfig | None = None,
    backend: Callable[..., Any] | None = None,
    options: Mapping[str, Any] | None = None,
    **given: Any,
) -> CachedMethod:
    """A bound method of a module, compiled and captured at its first call, or taken from its
    folder. All else that `torchair.inference.cache_compile` takes may be `given`."""
    from torchair.deploy.cached import cache_compile

    known = config_for_cache(config, backend, options or {})
    return cache_compile(func, config=tree_of(known), **given)


def readable_cache(cache_bin: Any, print_output: bool = True, file: Any = None) -> str:
    """The file of a compiled method as text; see `torchair.inference.readable_cache`."""
    from torchair.deploy.storing import readable_cache

    return readable_cache(cache_bin, print_output, file)
