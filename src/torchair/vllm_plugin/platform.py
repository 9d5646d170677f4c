"""The CPU platform of vLLM with torchair in the place of inductor.

It is loaded while vLLM's configuration is being imported, which is why functions import that.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.platforms.cpu import CpuPlatform

COMPILER = "torchair.vllm_plugin.compiler.TorchairCompiler"
WHOLE_GRAPH = "torchair.vllm_plugin.compiler.whole_graph"
WORKER = "torchair.vllm_plugin.worker.TorchairCpuWorker"
NO_PASSES = "torchair.vllm_plugin.compiler.NoPasses"
_NAMES = ("", "torchair", "npu", COMPILER, WHOLE_GRAPH)


def is_ours(vllm_config: Any) -> bool:
    """Whether a configuration compiles its model, with torchair."""
    from vllm.config import CompilationMode

    config = vllm_config.compilation_config
    return config.mode != CompilationMode.NONE and config.backend in _NAMES


class TorchairCpuPlatform(CpuPlatform):
    """vLLM's CPU platform; models are compiled by torchair unless a backend is named.

    Mode 3 (vLLM's default) becomes mode 2, as vLLM does on CPUs: one graph for all sizes, of which
    a file of ours is all that a second start needs. It stays mode 3, which keeps what Dynamo traced
    as well, where pieces or sizes are asked for.
    """

    @classmethod
    def get_compile_backend(cls) -> str:
        return COMPILER

    @classmethod
    def get_pass_manager_cls(cls) -> str:
        return NO_PASSES

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """vLLM looks through all modules for its kernels. llvmlite's library object stops it: any
        attribute that is asked for is there."""
        names = [name for name in sys.modules if name.partition(".")[0] == "llvmlite"]
        hidden = {name: sys.modules.pop(name) for name in names}
        try:
            super().register_triton_kernel_overrides()
        finally:
            sys.modules.update(hidden)

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        """Norms, rotary embeddings and activations as torch operators, which we fuse."""
        super().apply_config_platform_defaults(vllm_config)
        chosen = vllm_config.compilation_config.custom_ops
        if is_ours(vllm_config) and "all" not in chosen and "none" not in chosen:
            chosen.append("none")

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        from vllm.config import CompilationMode

        config = vllm_config.compilation_config
        ours, wanted = is_ours(vllm_config), config.mode
        if ours and vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = WORKER
        super().check_and_update_config(vllm_config)
        if not ours or config.mode == CompilationMode.NONE:  # LoRA switches compilation off
            return
        config.ir_enable_torch_wrap = False
        # Kernels lie beside what else vLLM keeps, so that one folder holds all of a warm start.
        os.environ.setdefault("TORCHAIR_CACHE_DIR", str(Path(envs.VLLM_CACHE_ROOT) / "torchair"))
        # That artefact is a pickle of inductor's results, named after inductor's and Triton's
        # sources; ours are files of their own.
        os.environ.setdefault("VLLM_USE_MEGA_AOT_ARTIFACT", "0")
        if wanted != CompilationMode.VLLM_COMPILE or not _in_parts(config):
            config.backend = WHOLE_GRAPH
            return
        config.mode, config.backend = wanted, COMPILER
        if config.splitting_ops is None:
            config.splitting_ops = []
        if config.compile_sizes is None:  # vLLM counts on a list; one graph serves all sizes
            config.compile_sizes = []


def _in_parts(config: Any) -> bool:
    """Whether a graph is to be split, or compiled again for some sizes."""
    return bool(config.splitting_ops or config.compile_sizes)
