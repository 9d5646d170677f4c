"""What is for inference alone: compiled methods that outlive their process, and gears."""

from typing import TYPE_CHECKING, Any

from torchair.garbage import no_garbage_collection

if TYPE_CHECKING:
    from torchair.deploy.cached import cache_compile
    from torchair.deploy.storing import readable_cache
    from torchair.fx.gears import set_dim_gears

__all__ = ["cache_compile", "readable_cache", "set_dim_gears"]

_OWNERS = {
    "cache_compile": "torchair.deploy.cached",
    "readable_cache": "torchair.deploy.storing",
    "set_dim_gears": "torchair.fx.gears",
}


def __getattr__(name: str) -> Any:
    """Load what is not needed at import when it is first asked for."""
    import importlib

    if name not in _OWNERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with no_garbage_collection():
        return getattr(importlib.import_module(_OWNERS[name]), name)
