"""Dumps of the original graph against known texts, on CPU tensors and on real `npu:0` tensors.

Run as a script this file compiles every case on an `npu` device that has tensors and no kernels,
and leaves the dumps in the folder given; graphs are dumped before anything has to run.
"""

# ruff: noqa: E501 - lines of expected dumps are as long as they are

from __future__ import annotations

import ctypes
import os
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchair
from golden_tools import (
    DEMO_DYNAMIC,
    DEMO_MARK_STATIC,
    DEMO_STATIC,
    HEADER,
    first_dump,
    normalized,
)
from processes import alone, run_forked
from torchair.engine.session import TorchNpuGraph
from torchair.errors import GraphError
from torchair.ge.graph import Graph
from torchair.operators import infer
from torchair.serde import load, parse_txt, same_graph

# ---- the models


class Demo(nn.Module):
    """Parameters, a buffer, a tensor input and a number."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.randn(64))
        self.linear1 = nn.Linear(128, 64)

    def forward(self, x, scale_factor):
        x = self.linear1(x)
        x = x - self.running_mean
        x = x * scale_factor
        return x


class Add(nn.Module):
    def forward(self, x, y):
        return torch.add(x, y)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln = nn.LayerNorm(32)
        self.fc1 = nn.Linear(32, 64)
        self.fc2 = nn.Linear(64, 16)

    def forward(self, x):
        return F.softmax(self.fc2(F.gelu(self.fc1(self.ln(x)))), dim=-1)


class AddInPlace(nn.Module):
    def forward(self, x, y):
        x.add_(y)
        return x * 2


class SymbolicReshape(nn.Module):
    def forward(self, x, n):
        return torch.ops.aten.view(x, [n, -1]).sum(0) + x.shape[0]


class TwoStreams(nn.Module):
    def forward(self, x):
        mm = torch.mm(x, x)
        abs = torch.abs(mm)
        add = torch.add(abs, 1)
        sub = torch.sub(x, mm)
        return add, sub


class Reduce(nn.Module):
    def forward(self, x):
        v, i = torch.topk(x, 2, -1)
        # fmt: off
        return x.sum(), x.mean(0), x.max(1)[0], x.argmax(-1), v, i, x.cumsum(0), torch.where(x > 0, x, -x)
        # fmt: on


class ConvNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval()

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


def two_streams_pass(gm: Any, example_inputs: Any, config: Any) -> None:
    """mm and abs on a stream of their own, sub after abs."""
    graph, air, aten = gm.graph, torch.ops.air, torch.ops.aten
    for node in graph.nodes:
        if node.target == aten.mm.default:
            with graph.inserting_before(node):
                graph.call_function(air.scope_enter.default, (["_user_stream_label"], ["stream_1"]))
        if node.target == aten.abs.default:
            with graph.inserting_after(node):
                record = graph.call_function(air.record.default, ())
            with graph.inserting_after(record):
                graph.call_function(air.scope_exit.default, ())
        if node.target == aten.sub.Tensor:
            with graph.inserting_before(node):
                graph.call_function(air.wait.default, ([record],))


# ---- the cases: how to compile, what AOTAutograd feeds the graph, and the expected text


@dataclass(frozen=True)
class Case:
    """One model, one way to compile it, and the dump that must come out (as on an NPU)."""

    model: Callable[[], nn.Module]
    args: Callable[[], list[Any]]
    expected: str
    feeds: Callable[[nn.Module, list[Any]], list[Any]] = lambda model, args: args
    dynamic: bool = False
    static_inputs: bool = False
    grad: bool = False
    custom_pass: Any = None

    def dump(self, folder: Path, kind: str, move: Any = lambda t: t) -> tuple[Any, Any, Any]:
        """Compile and call the model with dumps in `folder`: model, arguments, result."""
        torch._dynamo.reset()
        config = torchair.CompilerConfig()
        config.debug.graph_dump.type = kind
        config.debug.graph_dump.path = str(folder)
        if self.custom_pass is not None:
            config.post_grad_custom_pre_pass = self.custom_pass
        model = self.model()
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(move(p.detach())))
            for name, b in module.named_buffers(recurse=False):
                setattr(module, name, move(b))
        args = [move(a) if isinstance(a, torch.Tensor) else a for a in self.args()]
        if self.static_inputs:
            torch._dynamo.mark_static(args[0])
        backend = torchair.get_npu_backend(compiler_config=config)
        compiled = torch.compile(model, backend=backend, dynamic=self.dynamic, fullgraph=True)
        with torch.set_grad_enabled(self.grad):
            return model, args, compiled(*args)


def _demo_feeds(model: Any, args: list[Any]) -> list[Any]:
    return [model.linear1.weight, model.linear1.bias, args[0], model.running_mean, args[1]]


def _dynamic_demo_feeds(model: Any, args: list[Any]) -> list[Any]:
    weight, bias, x, mean, scale = _demo_feeds(model, args)
    return [weight, bias, x.shape[0], x, mean, scale]


def _mlp_feeds(m: Any, args: list[Any]) -> list[Any]:
    return [m.ln.weight, m.ln.bias, *args, m.fc1.weight, m.fc1.bias, m.fc2.weight, m.fc2.bias]


# Without autograd nothing is saved for a backward graph: no one asks for the size.
DEMO_DYNAMIC_NO_GRAD = "".join(
    line
    for line in DEMO_DYNAMIC.splitlines(keepends=True)
    if not line.startswith(("Shape_0", "Gather_0"))
)


ADD = """\
arg0_1_0 = ge.Data(index=0, dtype=9, shape=[], placement="CPU", node_name="arg0_1")
arg1_1_0 = ge.Data(index=1, dtype=0, shape=[-1, -1], placement="NPU", node_name="arg1_1")
arg2_1_0 = ge.Data(index=2, dtype=0, shape=[-1, -1], placement="NPU", node_name="arg2_1")

# File "model.py", line N, in forward    return torch.add(x, y)
## FX Code: add: torch.float32[s77, s77]npu:0 = torch.ops.aten.add.Tensor(arg1_1: torch.float32[s77, s77]npu:0, arg2_1: torch.float32[s77, s77]npu:0)
Add_0 = ge.Add(arg1_1_0, arg2_1_0, node_name="Add")

_ = ge.NetOutput([Add_0], dependencies=[])
"""

MLP = """\
arg0_1_0 = ge.Data(index=0, dtype=0, shape=[32], placement="NPU", node_name="arg0_1")
arg1_1_0 = ge.Data(index=1, dtype=0, shape=[32], placement="NPU", node_name="arg1_1")
arg2_1_0 = ge.Data(index=2, dtype=0, shape=[4, 32], placement="NPU", node_name="arg2_1")
arg3_1_0 = ge.Data(index=3, dtype=0, shape=[64, 32], placement="NPU", node_name="arg3_1")
arg4_1_0 = ge.Data(index=4, dtype=0, shape=[64], placement="NPU", node_name="arg4_1")
arg5_1_0 = ge.Data(index=5, dtype=0, shape=[16, 64], placement="NPU", node_name="arg5_1")
arg6_1_0 = ge.Data(index=6, dtype=0, shape=[16], placement="NPU", node_name="arg6_1")

# File "model.py", line N, in forward    return F.softmax(self.fc2(F.gelu(self.fc1(self.ln(x)))), dim=-1)
## FX Code: native_layer_norm = torch.ops.aten.native_layer_norm.default(arg2_1: torch.float32[4, 32]npu:0, [32], arg0_1: torch.float32[32]npu:0, arg1_1: torch.float32[32]npu:0, 1e-05)
[LayerNormV4_0, LayerNormV4_1, LayerNormV4_2] = ge.LayerNormV4(arg2_1_0, [32], arg0_1_0, arg1_1_0, epsilon=1e-05)
## FX Code: getitem: torch.float32[4, 32]npu:0 = operator.getitem(native_layer_norm, 0)

# File "model.py", line N, in forward    return F.softmax(self.fc2(F.gelu(self.fc1(self.ln(x)))), dim=-1)
## FX Code: t: torch.float32[32, 64]npu:0 = torch.ops.aten.t.default(arg3_1: torch.float32[64, 32]npu:0)
## FX Code: addmm: torch.float32[4, 64]npu:0 = torch.ops.aten.addmm.default(arg4_1: torch.float32[64]npu:0, getitem: torch.float32[4, 32]npu:0, t: torch.float32[32, 64]npu:0)
Transpose_0 = ge.Transpose(arg3_1_0, [1, 0], node_name="Transpose")
MatMulV2_0 = ge.MatMulV2(LayerNormV4_0, Transpose_0, None, None, node_name="MatMulV2")
Mul_0 = ge.Mul(MatMulV2_0, ge.Const(1, dtype=0), node_name="Mul")
Add_0 = ge.Add(Mul_0, arg4_1_0, node_name="Add")

# File "model.py", line N, in forward    return F.softmax(self.fc2(F.gelu(self.fc1(self.ln(x)))), dim=-1)
## FX Code: gelu: torch.float32[4, 64]npu:0 = torch.ops.aten.gelu.default(addmm: torch.float32[4, 64]npu:0)
Gelu_0 = ge.Gelu(Add_0, node_name="Gelu")

# File "model.py", line N, in forward    return F.softmax(self.fc2(F.gelu(self.fc1(self.ln(x)))), dim=-1)
## FX Code: t_1: torch.float32[64, 16]npu:0 = torch.ops.aten.t.default(arg5_1: torch.float32[16, 64]npu:0)
## FX Code: addmm_1: torch.float32[4, 16]npu:0 = torch.ops.aten.addmm.default(arg6_1: torch.float32[16]npu:0, gelu: torch.float32[4, 64]npu:0, t_1: torch.float32[64, 16]npu:0)
Transpose_1_0 = ge.Transpose(arg5_1_0, [1, 0], node_name="Transpose_1")
MatMulV2_1_0 = ge.MatMulV2(Gelu_0, Transpose_1_0, None, None, node_name="MatMulV2_1")
Mul_1_0 = ge.Mul(MatMulV2_1_0, ge.Const(1, dtype=0), node_name="Mul_1")
Add_1_0 = ge.Add(Mul_1_0, arg6_1_0, node_name="Add_1")

# File "model.py", line N, in forward    return F.softmax(self.fc2(F.gelu(self.fc1(self.ln(x)))), dim=-1)
## FX Code: _softmax: torch.float32[4, 16]npu:0 = torch.ops.aten._softmax.default(addmm_1: torch.float32[4, 16]npu:0, -1, False)
SoftmaxV2_0 = ge.SoftmaxV2(Add_1_0, axes=[-1], half_to_float=False, node_name="SoftmaxV2")

_ = ge.NetOutput([SoftmaxV2_0], dependencies=[])
"""

ADD_IN_PLACE = """\
arg0_1_0 = ge.Data(index=0, dtype=9, shape=[], placement="CPU", node_name="arg0_1")
arg1_1_0 = ge.Data(index=1, dtype=9, shape=[], placement="CPU", node_name="arg1_1")
arg2_1_0 = ge.Data(index=2, dtype=0, shape=[-1, -1], placement="NPU", node_name="arg2_1")
arg3_1_0 = ge.Data(index=3, dtype=0, shape=[-1, -1], placement="NPU", node_name="arg3_1")

# File "model.py", line N, in forward    x.add_(y)
## FX Code: add_6: torch.float32[s77, s27]npu:0 = torch.ops.aten.add.Tensor(arg2_1: torch.float32[s77, s27]npu:0, arg3_1: torch.float32[s77, s27]npu:0)
Add_0 = ge.Add(arg2_1_0, arg3_1_0, node_name="Add")

# File "model.py", line N, in forward    return x * 2
## FX Code: mul_6: torch.float32[s77, s27]npu:0 = torch.ops.aten.mul.Tensor(add_6: torch.float32[s77, s27]npu:0, 2)
Mul_0 = ge.Mul(Add_0, ge.Const(2, dtype=0), node_name="Mul")
Cast_0 = ge.Cast(Mul_0, dst_type=0, node_name="Cast")
## FX Code: copy_: torch.float32[s77, s27]npu:0 = torch.ops.aten.copy_.default(arg2_1: torch.float32[s77, s27]npu:0, add_6: torch.float32[s77, s27]npu:0)
Assign_0 = ge.Assign(arg2_1_0, Add_0, node_name="Assign")

_ = ge.NetOutput([Cast_0], dependencies=[])
"""

SYMBOLIC_RESHAPE = """\
arg0_1_0 = ge.Data(index=0, dtype=9, shape=[], placement="CPU", node_name="arg0_1")
arg1_1_0 = ge.Data(index=1, dtype=9, shape=[], placement="CPU", node_name="arg1_1")
arg2_1_0 = ge.Data(index=2, dtype=0, shape=[-1, -1], placement="NPU", node_name="arg2_1")
Shape_0 = ge.Shape(arg2_1_0, dtype=9, node_name="Shape")
Gather_0 = ge.Gather(Shape_0, 0, node_name="Gather")
arg3_1_0 = ge.Data(index=3, dtype=9, shape=[], placement="CPU", node_name="arg3_1")

# File "model.py", line N, in forward    return torch.ops.aten.view(x, [n, -1]).sum(0) + x.shape[0]
## FX Code: view: torch.float32[s86, s27*((s77//s86))]npu:0 = torch.ops.aten.reshape.default(arg2_1: torch.float32[s77, s27]npu:0, [arg3_1, -1])
Pack_0 = ge.Pack([arg3_1_0, -1], N=2, axis=0, node_name="Pack")
Reshape_0 = ge.Reshape(arg2_1_0, Pack_0, node_name="Reshape")
## FX Code: sum_1: torch.float32[s27*((s77//s86))]npu:0 = torch.ops.aten.sum.dim_IntList(view: torch.float32[s86, s27*((s77//s86))]npu:0, [0])
ReduceSum_0 = ge.ReduceSum(Reshape_0, [0], keep_dims=False, node_name="ReduceSum")
## FX Code: add_5: torch.float32[s27*((s77//s86))]npu:0 = torch.ops.aten.add.Tensor(sum_1: torch.float32[s27*((s77//s86))]npu:0, sym_size: "Sym(s77)")
Cast_0 = ge.Cast(Gather_0, dst_type=0, node_name="Cast")
Add_0 = ge.Add(ReduceSum_0, Cast_0, node_name="Add")

_ = ge.NetOutput([Add_0], dependencies=[])
"""

TWO_STREAMS = """\
arg0_1_0 = ge.Data(index=0, dtype=0, shape=[3, 3], placement="NPU", node_name="arg0_1")

# File "model.py", line N, in forward    mm = torch.mm(x, x)
## FX Code: mm: torch.float32[3, 3]npu:0 = torch.ops.aten.mm.default(arg0_1: torch.float32[3, 3]npu:0, arg0_1: torch.float32[3, 3]npu:0)
MatMul_0 = ge.MatMul(arg0_1_0, arg0_1_0, None, node_name="MatMul")

# File "model.py", line N, in forward    abs = torch.abs(mm)
## FX Code: abs_1: torch.float32[3, 3]npu:0 = torch.ops.aten.abs.default(mm: torch.float32[3, 3]npu:0)
Abs_0 = ge.Abs(MatMul_0, node_name="Abs")

# File "model.py", line N, in forward    add = torch.add(abs, 1)
## FX Code: add: torch.float32[3, 3]npu:0 = torch.ops.aten.add.Tensor(abs_1: torch.float32[3, 3]npu:0, 1)
Add_0 = ge.Add(Abs_0, ge.Const(1, dtype=0), node_name="Add")

# File "model.py", line N, in forward    sub = torch.sub(x, mm)
## FX Code: sub: torch.float32[3, 3]npu:0 = torch.ops.aten.sub.Tensor(arg0_1: torch.float32[3, 3]npu:0, mm: torch.float32[3, 3]npu:0)
Sub_0 = ge.Sub(arg0_1_0, MatMul_0, node_name="Sub")

_ = ge.NetOutput([Add_0, Sub_0], dependencies=[])
"""

REDUCE = """\
arg0_1_0 = ge.Data(index=0, dtype=0, shape=[4, 6], placement="NPU", node_name="arg0_1")

# File "model.py", line N, in forward    v, i = torch.topk(x, 2, -1)
## FX Code: topk = torch.ops.aten.topk.default(arg0_1: torch.float32[4, 6]npu:0, 2)
[TopKV2_0, TopKV2_1] = ge.TopKV2(arg0_1_0, 2, sorted=True, dim=-1, largest=True)
Cast_0 = ge.Cast(TopKV2_1, dst_type=9, node_name="Cast")
## FX Code: getitem: torch.float32[4, 2]npu:0 = operator.getitem(topk, 0)
## FX Code: getitem_1: torch.int64[4, 2]npu:0 = operator.getitem(topk, 1)

# File "model.py", line N, in forward    return x.sum(), x.mean(0), x.max(1)[0], x.argmax(-1), v, i, x.cumsum(0), torch.where(x > 0, x, -x)
## FX Code: sum_1: torch.float32[]npu:0 = torch.ops.aten.sum.default(arg0_1: torch.float32[4, 6]npu:0)
Cast_1_0 = ge.Cast(arg0_1_0, dst_type=0, node_name="Cast_1")
ReduceSum_0 = ge.ReduceSum(Cast_1_0, [0, 1], node_name="ReduceSum")

# File "model.py", line N, in forward    return x.sum(), x.mean(0), x.max(1)[0], x.argmax(-1), v, i, x.cumsum(0), torch.where(x > 0, x, -x)
## FX Code: mean: torch.float32[6]npu:0 = torch.ops.aten.mean.dim(arg0_1: torch.float32[4, 6]npu:0, [0])
ReduceMean_0 = ge.ReduceMean(arg0_1_0, [0], keep_dims=False, node_name="ReduceMean")

# File "model.py", line N, in forward    return x.sum(), x.mean(0), x.max(1)[0], x.argmax(-1), v, i, x.cumsum(0), torch.where(x > 0, x, -x)
## FX Code: max_1 = torch.ops.aten.max.dim(arg0_1: torch.float32[4, 6]npu:0, 1)
[ArgMaxWithValue_0, ArgMaxWithValue_1] = ge.ArgMaxWithValue(arg0_1_0, dimension=1, keep_dims=False)
Cast_2_0 = ge.Cast(ArgMaxWithValue_0, dst_type=9, node_name="Cast_2")
## FX Code: getitem_2: torch.float32[4]npu:0 = operator.getitem(max_1, 0)

# File "model.py", line N, in forward    return x.sum(), x.mean(0), x.max(1)[0], x.argmax(-1), v, i, x.cumsum(0), torch.where(x > 0, x, -x)
## FX Code: argmax: torch.int64[4]npu:0 = torch.ops.aten.argmax.default(arg0_1: torch.float32[4, 6]npu:0, -1)
ArgMaxV2_0 = ge.ArgMaxV2(arg0_1_0, ge.Const(-1, dtype=9), node_name="ArgMaxV2")

# File "model.py", line N, in forward    return x.sum(), x.mean(0), x.max(1)[0], x.argmax(-1), v, i, x.cumsum(0), torch.where(x > 0, x, -x)
## FX Code: cumsum: torch.float32[4, 6]npu:0 = torch.ops.aten.cumsum.default(arg0_1: torch.float32[4, 6]npu:0, 0)
Cumsum_0 = ge.Cumsum(arg0_1_0, 0, node_name="Cumsum")

# File "model.py", line N, in forward    return x.sum(), x.mean(0), x.max(1)[0], x.argmax(-1), v, i, x.cumsum(0), torch.where(x > 0, x, -x)
## FX Code: gt: torch.bool[4, 6]npu:0 = torch.ops.aten.gt.Scalar(arg0_1: torch.float32[4, 6]npu:0, 0)
Greater_0 = ge.Greater(arg0_1_0, ge.Const(0, dtype=0), node_name="Greater")

# File "model.py", line N, in forward    return x.sum(), x.mean(0), x.max(1)[0], x.argmax(-1), v, i, x.cumsum(0), torch.where(x > 0, x, -x)
## FX Code: neg: torch.float32[4, 6]npu:0 = torch.ops.aten.neg.default(arg0_1: torch.float32[4, 6]npu:0)
Neg_0 = ge.Neg(arg0_1_0, node_name="Neg")

# File "model.py", line N, in forward    return x.sum(), x.mean(0), x.max(1)[0], x.argmax(-1), v, i, x.cumsum(0), torch.where(x > 0, x, -x)
## FX Code: where: torch.float32[4, 6]npu:0 = torch.ops.aten.where.self(gt: torch.bool[4, 6]npu:0, arg0_1: torch.float32[4, 6]npu:0, neg: torch.float32[4, 6]npu:0)
SelectV2_0 = ge.SelectV2(Greater_0, arg0_1_0, Neg_0, node_name="SelectV2")

_ = ge.NetOutput([ReduceSum_0, ReduceMean_0, ArgMaxWithValue_1, ArgMaxV2_0, TopKV2_0, Cast_0, Cumsum_0, SelectV2_0], dependencies=[])
"""

# ---- comparison


def on_cpu(text: str) -> str:
    """An expected text for tensors on the CPU."""
    return text.replace('"NPU"', '"CPU"').replace("npu:0", "cpu")


CONV_NORM = """\
arg0_1_0 = ge.Data(index=0, dtype=0, shape=[4, 3, 3, 3], placement="NPU", node_name="arg0_1")
arg1_1_0 = ge.Data(index=1, dtype=0, shape=[4], placement="NPU", node_name="arg1_1")
arg2_1_0 = ge.Data(index=2, dtype=0, shape=[2, 3, 8, 8], placement="NPU", node_name="arg2_1")
arg3_1_0 = ge.Data(index=3, dtype=0, shape=[4], placement="NPU", node_name="arg3_1")
arg4_1_0 = ge.Data(index=4, dtype=0, shape=[4], placement="NPU", node_name="arg4_1")
arg5_1_0 = ge.Data(index=5, dtype=0, shape=[4], placement="NPU", node_name="arg5_1")
arg6_1_0 = ge.Data(index=6, dtype=0, shape=[4], placement="NPU", node_name="arg6_1")

# File "model.py", line N, in forward    return F.relu(self.norm(self.conv(x)))
## FX Code: convolution: torch.float32[2, 4, 6, 6]npu:0 = torch.ops.aten.convolution.default(arg2_1: torch.float32[2, 3, 8, 8]npu:0, arg0_1: torch.float32[4, 3, 3, 3]npu:0, arg1_1: torch.float32[4]npu:0, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
Conv2D_0 = ge.Conv2D(arg2_1_0, arg0_1_0, arg1_1_0, None, strides=[1, 1, 1, 1], pads=[0, 0, 0, 0], dilations=[1, 1, 1, 1], groups=1, data_format="NCHW", node_name="Conv2D")

# File "model.py", line N, in forward    return F.relu(self.norm(self.conv(x)))
## FX Code: _native_batch_norm_legit_no_training = torch.ops.aten._native_batch_norm_legit_no_training.default(convolution: torch.float32[2, 4, 6, 6]npu:0, arg5_1: torch.float32[4]npu:0, arg6_1: torch.float32[4]npu:0, arg3_1: torch.float32[4]npu:0, arg4_1: torch.float32[4]npu:0, 0.1, 1e-05)
Shape_0 = ge.Shape(Conv2D_0, dtype=3, node_name="Shape")
Cast_0 = ge.Cast(0.0, dst_type=0, node_name="Cast")
Fill_0 = ge.Fill([0], Cast_0, node_name="Fill")
BNInfer_0 = ge.BNInfer(Conv2D_0, arg5_1_0, arg6_1_0, arg3_1_0, arg4_1_0, epsilon=1e-05, node_name="BNInfer")
## FX Code: getitem: torch.float32[2, 4, 6, 6]npu:0 = operator.getitem(_native_batch_norm_legit_no_training, 0)

# File "model.py", line N, in forward    return F.relu(self.norm(self.conv(x)))
## FX Code: relu: torch.float32[2, 4, 6, 6]npu:0 = torch.ops.aten.relu.default(getitem: torch.float32[2, 4, 6, 6]npu:0)
Relu_0 = ge.Relu(BNInfer_0, node_name="Relu")

_ = ge.NetOutput([Relu_0], dependencies=[])
"""


def _conv_norm_feeds(m: Any, args: list[Any]) -> list[Any]:
    norm = m.norm
    return [
        m.conv.weight, m.conv.bias, *args, norm.running_mean, norm.running_var, norm.weight,
        norm.bias,
    ]  # fmt: skip


CASES = {
    f"{name}-{'grad' if grad else 'no_grad'}": Case(
        Demo,
        lambda: [torch.randn(100, 128), 100],
        text,
        feeds,
        dynamic=name != "static",
        static_inputs=name == "mark_static",
        grad=grad,
    )
    for name, grad, text, feeds in (
        ("static", True, DEMO_STATIC, _demo_feeds),
        ("static", False, DEMO_STATIC, _demo_feeds),
        ("dynamic", True, DEMO_DYNAMIC, _dynamic_demo_feeds),
        ("dynamic", False, DEMO_DYNAMIC_NO_GRAD, _dynamic_demo_feeds),
        ("mark_static", True, DEMO_MARK_STATIC, _demo_feeds),
        ("mark_static", False, DEMO_MARK_STATIC, _demo_feeds),
    )
} | {
    "add": Case(
        Add, lambda: [torch.randn(2, 2), torch.randn(2, 2)], ADD,
        lambda model, args: [2, *args], dynamic=True,
    ),
    "mlp": Case(Mlp, lambda: [torch.randn(4, 32)], MLP, _mlp_feeds),
    "add_in_place": Case(
        AddInPlace, lambda: [torch.randn(3, 8), torch.randn(3, 8)], ADD_IN_PLACE,
        lambda model, args: [3, 8, *args], dynamic=True,
    ),
    "symbolic_reshape": Case(
        SymbolicReshape, lambda: [torch.randn(6, 4), 3], SYMBOLIC_RESHAPE,
        lambda model, args: [6, 4, *args], dynamic=True,
    ),
    "two_streams": Case(
        TwoStreams, lambda: [torch.randn(3, 3)], TWO_STREAMS, custom_pass=two_streams_pass
    ),
    "reduce": Case(Reduce, lambda: [torch.randn(4, 6)], REDUCE),
    "conv_norm": Case(ConvNorm, lambda: [torch.randn(2, 3, 8, 8)], CONV_NORM, _conv_norm_feeds),
}  # fmt: skip


@pytest.fixture(scope="module")
def npu_dumps(tmp_path_factory):
    """Dumps of all cases compiled on npu tensors, in another process."""
    folder = tmp_path_factory.mktemp("npu")
    done = run_forked(__file__, str(folder), env=alone(os.pathsep.join(p for p in sys.path if p)))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("name", CASES)
def test_original_dump(name, tmp_path):
    case = CASES[name]
    case.dump(tmp_path, "py")
    text = first_dump(tmp_path)
    assert text.startswith(HEADER)
    assert normalized(text) == normalized(on_cpu(case.expected))


@pytest.mark.parametrize("name", CASES)
def test_original_dump_on_npu(name, npu_dumps):
    text = first_dump(npu_dumps / name)
    assert text.startswith(HEADER)
    assert normalized(text) == normalized(CASES[name].expected)


def test_running_on_a_device_without_kernels_says_so(npu_dumps):
    for name in CASES:
        assert (
            (npu_dumps / name / "error.txt")
            .read_text()
            .startswith("graphs cannot run on npu:0: torch has no kernels for that device")
        )


@pytest.mark.parametrize("name", CASES)
def test_original_dump_is_a_program(name, tmp_path):
    case = CASES[name]
    case.dump(tmp_path / "py", "py")
    case.dump(tmp_path / "txt", "txt")
    text = first_dump(tmp_path / "py")
    original = parse_txt(first_dump(tmp_path / "txt", "txt"), infer)
    with Graph("executed", infer) as executed:
        exec(compile(text, "dump", "exec"), {})
    loaded = load(text, infer)
    assert same_graph(original, executed) == []
    assert same_graph(original, loaded) == []
    assert same_graph(executed, loaded, strict=False) == []


@pytest.mark.parametrize("name", CASES)
def test_optimized_dump_runs(name, tmp_path):
    case = CASES[name]
    torch.manual_seed(0)
    model, args, _ = case.dump(tmp_path, "py")
    with torch.no_grad():
        mine = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        feeds = [f.detach().clone() if isinstance(f, torch.Tensor) else torch.tensor(f)
                 for f in case.feeds(model, args)]  # fmt: skip
        eager = model(*mine)
    placeholders = re.findall(r"ge\.Data\(.*node_name=\"(\w+)\"\)", first_dump(tmp_path))
    by_name = dict(zip(placeholders, feeds, strict=False))
    graph = load(first_dump(tmp_path, stage="optimized"), infer)
    session = TorchNpuGraph("loaded")
    session.load(graph)
    outputs = session.run([by_name[node.name] for node in graph.data])
    expected = list(eager) if isinstance(eager, tuple) else [eager]
    if name == "add_in_place":
        expected.append(mine[0])  # the updated input is one more output
    assert len(outputs) == len(expected)
    for got, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_control_edges_and_streams_show_in_the_other_forms(tmp_path):
    case = CASES["two_streams"]
    case.dump(tmp_path, "pbtxt")
    case.dump(tmp_path, "txt")
    blocks = first_dump(tmp_path, "pbtxt").split("\nnode {")
    inputs = {
        re.search(r'op: "(\w+)"', b)[1]: re.findall(r'input: "([^"]+)"', b)
        for b in blocks
        if 'op: "' in b
    }
    assert inputs["Sub"] == ["arg0_1:0", "MatMul:0", "^Abs"]
    assert [op for op, names in inputs.items() if any(n[0] == "^" for n in names)] == ["Sub"]
    graph = parse_txt(first_dump(tmp_path, "txt"), infer)
    labelled = {n.name: n.attr("_user_stream_label", None) for n in graph.nodes}
    assert {k for k, v in labelled.items() if v} == {"MatMul", "Abs"}
    assert labelled["MatMul"] == labelled["Abs"] == "stream_1"
    assert list(graph.node("Sub").control) == [graph.node("Abs")]


# ---- the npu device of the script


def make_npu_device() -> list[Any]:
    """Give PrivateUse1 the name npu and what torch wants to know of a device; no kernels."""
    acc = torch._C._acc

    class Guard(acc.DeviceGuard):
        def type_(self):
            return torch._C._autograd.DeviceType.PrivateUse1

    class Hooks(acc.PrivateUse1Hooks):
        def is_available(self):
            return True

        def has_primary_context(self, index):
            return True

        def is_built(self):
            return True

    torch.utils.rename_privateuse1_backend("npu")
    module = types.ModuleType("torch.npu")
    module.is_available = module.is_initialized = lambda: True
    module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    torch._register_device_module("npu", module)
    kept = [Hooks(), Guard()]
    acc.register_python_privateuseone_hook(kept[0])
    acc.register_python_privateuseone_device_guard(kept[1])
    return kept


def to_npu(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as a tensor on npu:0: a DLPack capsule with another device in it."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = torch.utils.dlpack.to_dlpack(tensor.detach().clone())
    device = pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
    ctypes.c_int32.from_address(device).value = 12  # kDLExtDev, which torch reads as PrivateUse1
    return torch.from_dlpack(capsule)


def dump_on_npu(folder: Path) -> None:
    kept = make_npu_device()
    for name, case in CASES.items():
        (folder / name).mkdir()
        try:
            case.dump(folder / name, "py", to_npu)
        except GraphError as e:
            (folder / name / "error.txt").write_text(str(e))
    del kept


if __name__ == "__main__":
    dump_on_npu(Path(sys.argv[1]))
