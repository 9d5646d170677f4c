"""Generates tokens with vLLM in a process of its own, and prints them with what was compiled.

python tests/tools/vllm_run.py MODEL OPTIONS    # options of `LLM` as JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

PROMPTS = [[(37 * i + 11 * j) % 512 for j in range(8 + 5 * i)] for i in range(5)]


def main(model: str, options: dict[str, object]) -> None:
    """Two batches of other sizes than those of the warm-up."""
    from torch._dynamo.utils import counters
    from vllm import LLM, SamplingParams
    from vllm.compilation.counter import compilation_counter
    from vllm.platforms import current_platform

    _take_float32()
    processes = _watched()
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        **options,
    )
    wanted = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    tokens = []
    for prompts in (PROMPTS[:1], PROMPTS):
        given = [{"prompt_token_ids": p} for p in prompts]
        made = llm.generate(given, wanted, use_tqdm=False)
        tokens += [list(m.outputs[0].token_ids) for m in made]
    worker = llm.llm_engine.model_executor.driver_worker.worker
    layers = [m for m in worker.get_model().modules() if hasattr(m, "cpu_linear")]
    print(
        json.dumps(
            {
                "tokens": tokens,
                "platform": type(current_platform).__name__,
                "worker": type(worker).__name__,
                "graphs": counters["torchair"]["dynamic"] + counters["torchair"]["static"],
                "dynamo": counters["stats"]["unique_graphs"],
                "loaded": compilation_counter.num_aot_artifacts_loaded,
                "inspections": sum("vllm.model_executor.models.registry" in p for p in processes),
                "pieces": compilation_counter.num_backend_compilations,
                "linear": sorted({_name(m.cpu_linear) for m in layers}),
                "quantised": sorted(
                    {
                        type(k).__name__
                        for k in map(_kernel, worker.get_model().modules())
                        if k is not None
                    }
                ),
                "numba": "numba" in sys.modules,
            }
        )
    )


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _kernel(layer: Any) -> Any:
    """What vLLM has chosen for a quantised linear layer."""
    method = getattr(layer, "scheme", None) or getattr(layer, "quant_method", None)
    return getattr(method, "kernel", None)


def _watched() -> list[list[str]]:
    """The commands that `subprocess.run` is called with from now on."""
    commands: list[list[str]] = []
    run = subprocess.run

    def watched(command: Any, *more: Any, **options: Any) -> Any:
        commands.append([command] if isinstance(command, str) else [str(p) for p in command])
        return run(command, *more, **options)

    subprocess.run = watched  # type: ignore[assignment]
    return commands


def _take_float32() -> None:
    """GPTQ and AWQ are for shorter floats in vLLM. Tokens are compared in float32."""
    import torch
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig

    for config in (AutoAWQConfig, AutoGPTQConfig):
        config.get_supported_act_dtypes = classmethod(lambda cls: [torch.float32])


if __name__ == "__main__":
    if "--numba" in sys.argv:
        sys.argv.remove("--numba")
        import numba

        assert numba.njit(lambda x: x + 1)(1) == 2
    main(sys.argv[1], json.loads(sys.argv[2]))
