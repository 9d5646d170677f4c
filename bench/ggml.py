"""llama.cpp as a contestant: the Llama of the examples, its weights written as GGUF and run through
the low-level API of llama-cpp-python, in this process. `make llama-cpp` installs it."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from models import LlamaConfig

TYPES = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0", "int4 g32": "Q4_0"}
"""The format of weights for each kind that has one."""


def missing() -> str:
    """Why llama.cpp cannot take part, nothing if it can."""
    absent = [m for m in ("llama_cpp", "gguf") if importlib.util.find_spec(m) is None]
    return f"not installed: {', '.join(absent)}; `make llama-cpp` builds it" if absent else ""


def write(path: Path, model: torch.nn.Module, config: LlamaConfig, form: str) -> None:
    """A model of float weights as a file of llama.cpp, matrices in one of its formats."""
    import gguf

    out = gguf.GGUFWriter(path, "llama")
    out.add_context_length(config.context)
    out.add_embedding_length(config.dim)
    out.add_block_count(config.layers)
    out.add_feed_forward_length(config.ffn)
    out.add_head_count(config.heads)
    out.add_head_count_kv(config.kv_heads)
    out.add_layer_norm_rms_eps(config.eps)
    out.add_rope_dimension_count(config.head_dim)
    out.add_rope_freq_base(config.theta)
    out.add_vocab_size(config.vocab)
    out.add_tokenizer_model("none")
    for name, weight in _tensors(model, config):
        kept = gguf.GGMLQuantizationType[form if weight.ndim > 1 else "F32"]
        out.add_tensor(name, gguf.quants.quantize(weight, kept), raw_dtype=kept)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _tensors(model: Any, config: LlamaConfig) -> Iterator[tuple[str, np.ndarray]]:
    def of(parameter: torch.Tensor) -> np.ndarray:
        return parameter.detach().float().numpy()

    def mixed(parameter: torch.Tensor, heads: int) -> np.ndarray:
        """Rows in the order of llama.cpp, which turns neighbours instead of halves."""
        weight = of(parameter)
        halves = weight.reshape(heads, 2, config.head_dim // 2, -1)
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)

    yield "token_embd.weight", of(model.embed.weight)
    yield "output_norm.weight", of(model.norm.weight)
    yield "output.weight", of(model.head.weight)
    for i, layer in enumerate(model.layers):
        parts = {
            "attn_norm": of(layer.norm1.weight), "ffn_norm": of(layer.norm2.weight),
            "attn_q": mixed(layer.query.weight, config.heads),
            "attn_k": mixed(layer.key.weight, config.kv_heads),
            "attn_v": of(layer.value.weight), "attn_output": of(layer.project.weight),
            "ffn_gate": of(layer.gate.weight), "ffn_up": of(layer.up.weight),
            "ffn_down": of(layer.down.weight),
        }  # fmt: skip
        for name, weight in parts.items():
            yield f"blk.{i}.{name}.weight", weight


class Runner:
    """A file of llama.cpp, loaded, with a cache of keys and values."""

    def __init__(self, path: Path, config: LlamaConfig) -> None:
        import llama_cpp.llama_cpp as api

        self._api, self._vocab = api, config.vocab
        self._silence = api.llama_log_callback(lambda *_: None)
        api.llama_log_set(self._silence, ctypes.c_void_p(0))
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(
            str(path).encode(), api.llama_model_default_params()
        )
        given = api.llama_context_default_params()
        given.n_ctx = given.n_batch = given.n_ubatch = config.context
        given.n_threads = given.n_threads_batch = torch.get_num_threads()
        given.no_perf = True
        self._context = api.llama_init_from_model(self._model, given) if self._model else None
        if not self._context:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self._memory = api.llama_get_memory(self._context)

    def call(self, tokens: torch.Tensor, start: int) -> Callable[[], Any]:
        """A call with tokens that stand at `start` and after; gives the logits of the last."""
        api, count = self._api, tokens.numel()
        batch = api.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i, token in enumerate(tokens.flatten().tolist()):
            batch.token[i], batch.pos[i] = token, start + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i == count - 1

        def run() -> Any:
            api.llama_memory_seq_rm(self._memory, 0, start, -1)
            if api.llama_decode(self._context, batch) != 0:
                raise RuntimeError("llama.cpp has not computed a batch")
            return api.llama_get_logits_ith(self._context, count - 1)

        return run

    def logits(self, run: Callable[[], Any]) -> torch.Tensor:
        """What a call gives, as a tensor."""
        return torch.from_numpy(np.ctypeslib.as_array(run(), (self._vocab,)).copy())
