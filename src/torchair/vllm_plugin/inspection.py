"""What vLLM asks a model's class, answered in this process.

vLLM imports the class in a process of its own, which imports all of vLLM again, so that asking does
not initialise CUDA. On a CPU there is nothing to initialise, and the class is imported anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from vllm.platforms import current_platform

from torchair.vllm_plugin.platform import TorchairCpuPlatform


def inspect_here(registry: ModuleType) -> None:
    """Where our platform is in use; `registry` is the module of vLLM that knows its models."""
    elsewhere = registry._run_in_subprocess

    def run(ask: Callable[[], Any]) -> Any:
        return ask() if isinstance(current_platform, TorchairCpuPlatform) else elsewhere(ask)

    registry._run_in_subprocess = run  # type: ignore[attr-defined]
