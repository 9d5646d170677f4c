"""vLLM's worker for CPUs with a shorter warm-up, and with less garbage collection before it."""

from __future__ import annotations

import gc

from vllm.v1.worker.cpu_worker import CPUWorker

from torchair.fx.size_arithmetic import remembered_sizes
from torchair.garbage import no_garbage_collection
from torchair.vllm_plugin.platform import is_ours

WARM_UP = 64
"""Tokens of the warm-up."""


class TorchairCpuWorker(CPUWorker):
    """vLLM warms a model up with the largest batch, so that it knows how much memory that leaves
    for the cache. Where the user has said how large the cache is (`--kv-cache-memory-bytes`,
    `VLLM_CPU_KVCACHE_SPACE`) a small batch will do: our graphs serve all numbers of tokens."""

    def load_model(self, **options: bool) -> None:
        """vLLM looks for garbage nine times during a start, each time among all the objects of its
        modules, and freezes those at the end. Here they are frozen at the beginning."""
        gc.collect()
        gc.freeze()
        super().load_model(**options)

    def determine_available_memory(self) -> int:
        gc.freeze()  # vLLM has just collected
        with no_garbage_collection(), remembered_sizes():
            found = self._available_memory()
        gc.freeze()  # and again
        return found

    def _available_memory(self) -> int:
        runner, most = self.model_runner, self.model_runner.max_num_tokens
        if is_ours(self.vllm_config) and self.cache_config.kv_cache_memory_bytes is not None:
            runner.max_num_tokens = min(most, max(WARM_UP, runner.max_num_reqs))
        try:
            return super().determine_available_memory()
        finally:
            runner.max_num_tokens = most
