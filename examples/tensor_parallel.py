"""A Llama and a BERT of transformers cut among processes, compiled: the sums of the parts are nodes
of the graph, and logits are those of one process.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py             cut by hand with DTensor
    torchrun --nproc-per-node 2 examples/tensor_parallel.py --auto      a Llama with tp_plan="auto"
    torchrun --nproc-per-node 2 examples/tensor_parallel.py --train     FSDP2 and DDP, three steps

Needs the package `transformers`; `--auto` also `accelerate`. gloo on CPU, NCCL where each process
has a GPU.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import torchair  # noqa: F401  (registers the backends)

BACKENDS = ("torchair", "npugraph_ex")
SIZES = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=96
)
COLUMNS = {
    "llama": (*(f"self_attn.{k}_proj" for k in "qkv"), "mlp.gate_proj", "mlp.up_proj"),
    "bert": (*(f"attention.self.{k}" for k in ("query", "key", "value")), "intermediate.dense"),
}
ROWS = {
    "llama": ("self_attn.o_proj", "mlp.down_proj"),
    "bert": ("attention.output.dense", "output.dense"),
}


def cut_by_hand(model: Any, mesh: DeviceMesh) -> Any:
    """Columns of the first products and rows of the second of each pair go to each process."""
    kind = model.config.model_type
    plan: dict[str, Any] = {n: ColwiseParallel() for n in COLUMNS[kind]}
    plan |= {n: RowwiseParallel() for n in ROWS[kind]}
    for layer in model.bert.encoder.layer if kind == "bert" else model.model.layers:
        parallelize_module(layer, mesh, plan)
        if kind == "bert":  # its attention counts heads, that of Llama takes what comes
            layer.attention.self.num_attention_heads //= mesh.size()
            layer.attention.self.all_head_size //= mesh.size()
    return model


def cut_by_transformers(model: Any, rank: int) -> Any:
    """As a checkpoint is loaded with `tp_plan="auto"`."""
    folder = [tempfile.mkdtemp(prefix="tensor_parallel_") if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    if rank == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    return LlamaForCausalLM.from_pretrained(folder[0], tp_plan="auto").eval()


def check_logits(whole: Any, cut: Any, rank: int, device: torch.device) -> None:
    """Both backends against one process that has all of the model."""
    ids = torch.randint(0, SIZES["vocab_size"], (2, 7), device=device)
    with torch.no_grad():
        expected = whole(ids).logits
        for backend in BACKENDS:
            torch._dynamo.reset()
            compiled = torch.compile(cut, backend=backend)
            for _ in range(2):
                got = compiled(ids).logits
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
            if rank == 0:
                name = type(whole).__name__
                print(f"{name}, {backend}: logits equal to one process", flush=True)


def check_training(whole: Any, mesh: DeviceMesh, rank: int, device: torch.device) -> None:
    """Three steps on halves of a batch, against one process that has all of it."""
    ids = torch.randint(0, SIZES["vocab_size"], (2 * mesh.size(), 7), device=device)
    parts = ids.chunk(mesh.size())
    reference = copy.deepcopy(whole).train()
    take_steps(reference, reference, parts)
    for kind in ("DDP", "FSDP2"):
        for backend in BACKENDS:
            torch._dynamo.reset()
            model: Any = copy.deepcopy(whole).train()
            if kind == "DDP":
                model = DistributedDataParallel(model)
            else:
                for layer in model.model.layers:
                    fully_shard(layer, mesh=mesh)
                fully_shard(model, mesh=mesh)
            compiled = torch.compile(model, backend=backend)
            take_steps(model, compiled, [parts[rank]])
            for got, expected in zip(model.parameters(), reference.parameters(), strict=True):
                full = got.full_tensor() if hasattr(got, "full_tensor") else got
                torch.testing.assert_close(full, expected, rtol=1e-4, atol=1e-5)
            if rank == 0:
                print(f"{kind}, {backend}: weights equal to one process", flush=True)


def take_steps(model: Any, call: Any, parts: Sequence[torch.Tensor]) -> None:
    """Three steps of an optimizer over the mean loss of some parts of a batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (sum(call(p, labels=p).loss for p in parts) / len(parts)).backward()
        optimizer.step()


def main() -> None:
    """What each process does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--auto", action="store_true", help='cut by tp_plan="auto"')
    parser.add_argument("--train", action="store_true", help="FSDP2 and DDP instead")
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 " + " ".join(sys.argv))
    warnings.simplefilter("ignore")
    local = int(os.environ["LOCAL_RANK"])
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    try:
        rank, mesh = dist.get_rank(), init_device_mesh(device.type, (dist.get_world_size(),))
        torch.manual_seed(0)
        whole = LlamaForCausalLM(LlamaConfig(**SIZES)).eval().to(device)
        encoder = BertForMaskedLM(BertConfig(**SIZES)).eval().to(device)
        if options.train:
            check_training(whole, mesh, rank, device)
        elif options.auto:
            check_logits(whole, cut_by_transformers(whole, rank), rank, device)
        else:
            for model in (whole, encoder):
                check_logits(model, cut_by_hand(copy.deepcopy(model), mesh), rank, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
