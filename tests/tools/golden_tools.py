"""Dumps of graphs as known, and how they are compared."""

# ruff: noqa: E501 (dumps)

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

HEADER = """\
# -*- coding: utf-8 -*-
from torch import tensor
from torchair._ge_concrete_graph import ge_apis as ge
from torchair.ge._ge_graph import get_default_ge_graph

"""


DEMO_STATIC = """\
primals_1_0 = ge.Data(index=0, dtype=0, shape=[64, 128], placement="NPU", node_name="primals_1")
primals_2_0 = ge.Data(index=1, dtype=0, shape=[64], placement="NPU", node_name="primals_2")
primals_3_0 = ge.Data(index=2, dtype=0, shape=[100, 128], placement="NPU", node_name="primals_3")
primals_4_0 = ge.Data(index=3, dtype=0, shape=[64], placement="NPU", node_name="primals_4")

# File "test.py", line 24, in forward    x = self.linear1(x)
## FX Code: t: torch.float32[128, 64]npu:0 = torch.ops.aten.t.default(primals_1: torch.float32[64, 128]npu:0)
## FX Code: addmm: torch.float32[100, 64]npu:0 = torch.ops.aten.addmm.default(primals_2: torch.float32[64]npu:0, primals_3: torch.float32[100, 128]npu:0, t: torch.float32[128, 64]npu:0)
Transpose_0 = ge.Transpose(primals_1_0, [1, 0], node_name="Transpose")
MatMulV2_0 = ge.MatMulV2(primals_3_0, Transpose_0, None, None, node_name="MatMulV2")
Mul_0 = ge.Mul(MatMulV2_0, ge.Const(1, dtype=0), node_name="Mul")
Add_0 = ge.Add(Mul_0, primals_2_0, node_name="Add")

# File "test.py", line 25, in forward    x = x - self.running_mean
## FX Code: sub: torch.float32[100, 64]npu:0 = torch.ops.aten.sub.Tensor(addmm: torch.float32[100, 64]npu:0, primals_4: torch.float32[64]npu:0)
Sub_0 = ge.Sub(Add_0, primals_4_0, node_name="Sub")

# File "test.py", line 26, in forward    x = x * scale_factor
## FX Code: mul: torch.float32[100, 64]npu:0 = torch.ops.aten.mul.Tensor(sub: torch.float32[100, 64]npu:0, 100)
Mul_1_0 = ge.Mul(Sub_0, ge.Const(100, dtype=0), node_name="Mul_1")
Cast_0 = ge.Cast(Mul_1_0, dst_type=0, node_name="Cast")

_ = ge.NetOutput([Cast_0], dependencies=[])
"""


DEMO_DYNAMIC = """\
primals_1_0 = ge.Data(index=0, dtype=0, shape=[64, 128], placement="NPU", node_name="primals_1")
primals_2_0 = ge.Data(index=1, dtype=0, shape=[64], placement="NPU", node_name="primals_2")
primals_3_0 = ge.Data(index=2, dtype=9, shape=[], placement="CPU", node_name="primals_3")
primals_4_0 = ge.Data(index=3, dtype=0, shape=[-1, 128], placement="NPU", node_name="primals_4")
Shape_0 = ge.Shape(primals_4_0, dtype=9, node_name="Shape")
Gather_0 = ge.Gather(Shape_0, 0, node_name="Gather")
primals_5_0 = ge.Data(index=4, dtype=0, shape=[64], placement="NPU", node_name="primals_5")
primals_6_0 = ge.Data(index=5, dtype=9, shape=[], placement="CPU", node_name="primals_6")

# File "test.py", line 24, in forward    x = self.linear1(x)
## FX Code: t: torch.float32[128, 64]npu:0 = torch.ops.aten.t.default(primals_1: torch.float32[64, 128]npu:0)
## FX Code: addmm: torch.float32[s0, 64]npu:0 = torch.ops.aten.addmm.default(primals_2: torch.float32[64]npu:0, primals_4: torch.float32[s0, 128]npu:0, t: torch.float32[128, 64]npu:0)
Transpose_0 = ge.Transpose(primals_1_0, [1, 0], node_name="Transpose")
MatMulV2_0 = ge.MatMulV2(primals_4_0, Transpose_0, None, None, node_name="MatMulV2")
Mul_0 = ge.Mul(MatMulV2_0, ge.Const(1, dtype=0), node_name="Mul")
Add_0 = ge.Add(Mul_0, primals_2_0, node_name="Add")

# File "test.py", line 25, in forward    x = x - self.running_mean
## FX Code: sub_1: torch.float32[s0, 64]npu:0 = torch.ops.aten.sub.Tensor(addmm: torch.float32[s0, 64]npu:0, primals_5: torch.float32[64]npu:0)
Sub_0 = ge.Sub(Add_0, primals_5_0, node_name="Sub")

# File "test.py", line 26, in forward    x = x * scale_factor
## FX Code: mul_4: torch.float32[s0, 64]npu:0 = torch.ops.aten.mul.Tensor(sub_1: torch.float32[s0, 64]npu:0, primals_6: "Sym(s2)")
Cast_0 = ge.Cast(primals_6_0, dst_type=0, node_name="Cast")
Mul_1_0 = ge.Mul(Sub_0, Cast_0, node_name="Mul_1")
Cast_1_0 = ge.Cast(Mul_1_0, dst_type=0, node_name="Cast_1")

_ = ge.NetOutput([Cast_1_0], dependencies=[])
"""


DEMO_MARK_STATIC = """\
primals_1_0 = ge.Data(index=0, dtype=0, shape=[64, 128], placement="NPU", node_name="primals_1")
primals_2_0 = ge.Data(index=1, dtype=0, shape=[64], placement="NPU", node_name="primals_2")
primals_3_0 = ge.Data(index=2, dtype=0, shape=[100, 128], placement="NPU", node_name="primals_3")
primals_4_0 = ge.Data(index=3, dtype=0, shape=[64], placement="NPU", node_name="primals_4")
primals_5_0 = ge.Data(index=4, dtype=9, shape=[], placement="CPU", node_name="primals_5")

# File "test.py", line 24, in forward    x = self.linear1(x)
## FX Code: t: torch.float32[128, 64]npu:0 = torch.ops.aten.t.default(primals_1: torch.float32[64, 128]npu:0)
## FX Code: addmm: torch.float32[100, 64]npu:0 = torch.ops.aten.addmm.default(primals_2: torch.float32[64]npu:0, primals_3: torch.float32[100, 128]npu:0, t: torch.float32[128, 64]npu:0)
Transpose_0 = ge.Transpose(primals_1_0, [1, 0], node_name="Transpose")
MatMulV2_0 = ge.MatMulV2(primals_3_0, Transpose_0, None, None, node_name="MatMulV2")
Mul_0 = ge.Mul(MatMulV2_0, ge.Const(1, dtype=0), node_name="Mul")
Add_0 = ge.Add(Mul_0, primals_2_0, node_name="Add")

# File "test.py", line 25, in forward    x = x - self.running_mean
## FX Code: sub: torch.float32[100, 64]npu:0 = torch.ops.aten.sub.Tensor(addmm: torch.float32[100, 64]npu:0, primals_4: torch.float32[64]npu:0)
Sub_0 = ge.Sub(Add_0, primals_4_0, node_name="Sub")

# File "test.py", line 26, in forward    x = x * scale_factor
## FX Code: mul: torch.float32[100, 64]npu:0 = torch.ops.aten.mul.Tensor(sub: torch.float32[100, 64]npu:0, primals_5: "Sym(s0)")
Cast_0 = ge.Cast(primals_5_0, dst_type=0, node_name="Cast")
Mul_1_0 = ge.Mul(Sub_0, Cast_0, node_name="Mul_1")
Cast_1_0 = ge.Cast(Mul_1_0, dst_type=0, node_name="Cast_1")

_ = ge.NetOutput([Cast_1_0], dependencies=[])
"""


def normalized(text: str) -> list[str]:
    """Lines of a dump with the names that depend on torch, the mode and the place replaced.

    Attributes that no call shows are dropped: they stand behind the graph, as further calls.
    """
    lines = text.removeprefix(HEADER).splitlines()
    end = max(i for i, line in enumerate(lines) if "ge.NetOutput(" in line) + 1
    assert all(line.startswith("get_default_ge_graph().") for line in lines[end:])
    names: dict[str, str] = {}

    def ordered(prefix: str) -> Callable[[re.Match[str]], str]:
        count = {"n": 0}

        def replace(match: re.Match[str]) -> str:
            if match[0] not in names:
                names[match[0]] = f"{prefix}{count['n']}"
                count["n"] += 1
            return names[match[0]]

        return replace

    text = "\n".join(_without_place(line) for line in lines[:end])
    text = re.sub(r"\b(?:primals_\d+|arg\d+_1)(?=_0\b|\b)", ordered("input"), text)
    return re.sub(r"\bs\d+\b", ordered("symbol"), text).splitlines()


def _without_place(line: str) -> str:
    """A source comment without file, line number and the marks under the expression."""
    return re.sub(r'^# File ".*?", line \w+, in (\w+) +(.*?)(?: +[~^]+)?$', r"# File \1: \2", line)


def first_dump(folder: Path, kind: str = "py", stage: str = "original") -> str:
    """The dump of the forward graph, which is compiled first."""
    files = sorted(
        folder.glob(f"dynamo_{stage}_graph_*.{kind}"), key=lambda f: int(f.name.split("_")[3])
    )
    assert files, f"no {stage} dump in {list(folder.iterdir())}"
    return files[0].read_text()
