"""Operators of the `npu` library for experts, products and number formats: values, fake results,
conversion, compiled graphs in all modes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import npu_comm_cases
import npu_expert_cases
import npu_format_references as formats
import npu_mx_cases
import npu_product_cases
import torchair
import torchair.ascend.emulate.facade
from npu_cases import Case, npu, randint, randn
from npu_results import assert_close, copies
from op_harness import check
from torchair.convert import GraphConverter
from torchair.operators import infer

Tensor = torch.Tensor
MODULES = (npu_mx_cases, npu_expert_cases, npu_product_cases, npu_comm_cases)
ALL = [case for module in MODULES for case in module.CASES]
by_name = pytest.mark.parametrize("case", ALL, ids=str)


@by_name
def test_values(case):
    inputs = copies(case.inputs)
    expected = Case("", case.expected, (), case.expected).call(*case.inputs)
    assert_close(case.call(*inputs), expected, case.rough)
    for used, given in zip(inputs, case.inputs, strict=True):
        assert torch.equal(used.view(torch.uint8), given.view(torch.uint8))


@by_name
def test_fake_results_look_like_real_ones(case):
    real = case.call(*case.inputs)
    with FakeTensorMode() as mode:
        fake = case.call(*(mode.from_tensor(t) for t in case.inputs))
    assert [(r.shape, r.dtype) for r in real] == [(f.shape, f.dtype) for f in fake]


@by_name
def test_conversion(case):
    conversion = check(case.call, *case.inputs, generic=case.generic, strict=not case.generic)
    assert bool(conversion.generic) == case.generic


# ---- compiled graphs, many operators in each ----


def together(cases: list[Case]) -> tuple[Any, list[Tensor]]:
    """A function that calls all cases, and arguments for it."""
    inputs = [t.clone() for case in cases for t in case.inputs]
    starts = [sum(len(c.inputs) for c in cases[:k]) for k in range(len(cases))]

    def call(*tensors: Tensor) -> list[Any]:
        found: list[Any] = []
        for case, k in zip(cases, starts, strict=True):
            found += case.call(*tensors[k : k + len(case.inputs)])
        return found

    return call, inputs


def config(mode: str) -> Any:
    made = torchair.CompilerConfig()
    made.mode = mode
    return made


BACKENDS: dict[str, Any] = {
    "max-autotune": lambda: torchair.get_npu_backend(compiler_config=config("max-autotune")),
    "reduce-overhead": lambda: torchair.get_npu_backend(compiler_config=config("reduce-overhead")),
    "npugraph_ex": lambda: "npugraph_ex",
}
# One case an operator is enough where the others differ in numbers only.
SOME = list({str(case.name).partition("-")[0]: case for case in ALL}.values())


@pytest.mark.parametrize("mode", BACKENDS)
def test_compiled(mode):
    import npugraph_ex  # noqa: F401

    call, inputs = together(SOME)
    torch._dynamo.reset()
    fast = torch.compile(call, backend=BACKENDS[mode](), fullgraph=True, dynamic=False)
    expected = call(*inputs)
    with torch.no_grad():
        for _ in range(2):
            assert_close(fast(*inputs), expected, 1e-6)


# ---- updates in place ----


def _accumulated(out: Tensor, x: Tensor, dy: Tensor) -> Tensor:
    npu._npu_matmul_add_fp32(x, dy, out)
    return out


def _given(name: str) -> tuple[Tensor, ...]:
    return next(c for c in npu_product_cases.CASES if c.name == name).inputs


INPLACE = {
    **{f"npu_{name}_": (fn, _given(name)) for name, fn in npu_product_cases.UPDATES.items()},
    "_npu_matmul_add_fp32": (_accumulated, (randn(3, 4), randn(5, 3), randn(5, 4))),
}


@pytest.mark.parametrize("name", INPLACE)
def test_updates_in_place(name):
    fn, inputs = INPLACE[name]
    eager, ours = copies(inputs), copies(inputs)
    fn(*eager)
    assert not torch.equal(eager[0], inputs[0])
    torch._dynamo.reset()
    backend = torchair.get_npu_backend()
    torch.compile(lambda *x: (fn(*x), x[0] + 1)[1], backend=backend, fullgraph=True)(*ours)
    torch.testing.assert_close(ours[0], eager[0])


@pytest.mark.parametrize("name", ["npu_add_quant_matmul_", "npu_add_quant_gmm_"])
def test_the_update_itself_is_converted(name):
    fn, inputs = INPLACE[name]
    traced = make_fx(lambda *x: fn(*x) + 1, tracing_mode="fake")(*copies(inputs))
    examples = [n.meta["val"] for n in traced.graph.nodes if n.op == "placeholder"]
    graph = GraphConverter(traced, "graph_1", infer, strict=True).run(*examples).graph
    assert any("InplaceAdd" in node.type for node in graph.nodes)
    assert any(node.type == "Assign" for node in graph.nodes)


# ---- gradients ----


@pytest.mark.parametrize("rows", [None, 7])
def test_gradients_of_permuting(rows):
    experts = torch.tensor([[1, 0], [3, 1], [0, 2], [2, 1]])

    def there_and_back(x: Tensor, weights: Tensor) -> Tensor:
        permuted, places = npu.npu_moe_token_permute(x, experts, rows)
        return npu.npu_moe_token_unpermute(permuted * permuted, places, weights)

    inputs = randn(4, 3).double().requires_grad_(), randn(4, 2).double().requires_grad_()
    assert torch.autograd.gradcheck(there_and_back, inputs)


def test_gradients_of_products_and_casts():
    inputs = [randn(*d).double().requires_grad_() for d in ((3, 4), (5, 4), (5,))]
    assert torch.autograd.gradcheck(npu.npu_linear, inputs)
    x = randn(3).requires_grad_()
    npu.npu_dtype_cast(x, torch.bfloat16).float().sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones(3))


# ---- number formats ----


def test_every_byte_of_hifloat8_comes_back():
    stored = torch.tensor(sorted(formats.hifloat8_values()), dtype=torch.uint8)
    values = npu.npu_dtype_cast(stored, torch.float32, 290)
    assert values.tolist() == [formats.hifloat8_values()[b] for b in stored.tolist()]
    assert torch.equal(npu.npu_dtype_cast(values, 290), stored)
    ends = torch.tensor([math.nan, math.inf, -math.inf, 40959.0, 40960.0, 2.0**-24])
    assert npu.npu_dtype_cast(ends, 290).tolist() == [0x80, 0x6F, 0xEF, 0x6E, 0x6F, 0]


HIFLOAT8 = {
    0x01: 2.0**-22, 0x07: 2.0**-16, 0x08: 1.0, 0x0F: 1.875, 0x10: 2.0, 0x1F: 0.9375, 0x20: 4.0,
    0x3F: 0.234375, 0x40: 16.0, 0x5F: 0.013671875, 0x60: 256.0, 0x6E: 32768.0, 0x70: 2.0**-8,
    0x7E: 2.0**-15, 0x7F: 1.5 * 2.0**-15, 0x88: -1.0, 0xEE: -32768.0,
}  # fmt: skip
"""Bytes as the package `en_dtypes` of the format's authors reads them."""


def test_bytes_of_hifloat8_are_those_of_its_authors():
    stored = torch.tensor(list(HIFLOAT8), dtype=torch.uint8)
    assert npu.npu_dtype_cast(stored, torch.float32, 290).tolist() == list(HIFLOAT8.values())


def test_hifloat8_beside_the_package_of_its_authors():
    kind = pytest.importorskip("en_dtypes", reason="pip install en-dtypes").hifloat8
    numpy = pytest.importorskip("numpy")
    every = numpy.arange(256, dtype=numpy.uint8)
    theirs = torch.from_numpy(every.view(kind).astype(numpy.float32))
    ours = npu.npu_dtype_cast(torch.from_numpy(every), torch.float32, 290)
    assert torch.equal(ours.nan_to_num(7e7), theirs.nan_to_num(7e7))
    some = torch.ldexp(torch.randn(20000), torch.randint(-26, 18, (20000,)))
    x = torch.cat([theirs, (theirs[1:] + theirs[:-1]) / 2, some])
    bytes_ = torch.from_numpy(x.numpy().astype(kind).view(numpy.uint8))
    assert torch.equal(npu.npu_dtype_cast(x, 290), bytes_)


def test_blocks_with_numbers_that_are_none():
    x = torch.tensor([[math.inf] + [1.0] * 31, [0.0] * 32])
    y, scales = npu.npu_dynamic_mx_quant(x, dst_type=292)
    assert scales.flatten().tolist() == [255, 0, 0, 0]
    assert torch.equal(y.float()[1], torch.zeros(32))


def test_types_have_names():
    facade = torchair.ascend.emulate.facade.TYPES
    assert facade["float8_e8m0fnu"] == 293 and facade["hifloat8"] == 290
    assert facade["float4_e2m1fn_x2"] == 296


# ---- what is refused ----

_EIGHT = randint(-9, 9, 4, 8)
REFUSED: dict[str, Any] = {
    "dst_type": lambda: npu.npu_dynamic_mx_quant(randn(2, 32), dst_type=1),
    "round_mode": lambda: npu.npu_dynamic_mx_quant(randn(2, 32), round_mode="up"),
    "block_size": lambda: npu.npu_dynamic_mx_quant(randn(2, 32), block_size=48),
    "axis": lambda: npu.npu_dynamic_mx_quant(randn(2, 32), axis=2),
    "scale_alg": lambda: npu.npu_dynamic_mx_quant(randn(2, 32), scale_alg=3),
    "input": lambda: npu.npu_dynamic_mx_quant(randn(2, 33)),
    "src_type": lambda: npu.npu_anti_mx_quant(_EIGHT, _EIGHT, src_type=292),
    "blocksize": lambda: npu.npu_grouped_dynamic_mx_quant(
        randn(2, 2), torch.tensor([2]), blocksize=64
    ),
    "x": lambda: npu.npu_dynamic_block_quant(randn(2)),
    "norm_type": lambda: npu.npu_moe_gating_top_k(randn(2, 8), 2, norm_type=2),
    "group_count": lambda: npu.npu_moe_gating_top_k(randn(2, 8), 2, group_count=3),
    "padded_mode": lambda: npu.npu_moe_token_permute(randn(2, 8), _EIGHT[:2, :2], None, True),
    "idx_type": lambda: npu.npu_moe_re_routing(randn(2, 8), torch.tensor([[2]]), idx_type=2),
    "expert_token_num_per_rank": lambda: npu.npu_moe_re_routing(randn(2, 8), torch.tensor([[3]])),
    "local_rank_id": lambda: npu.npu_moe_update_expert(
        torch.tensor([[0]]), torch.tensor([[1, 0]], dtype=torch.int32)
    ),
    "quant_mode": lambda: npu.npu_moe_init_routing_v2(
        randn(2, 8), torch.tensor([[0], [0]]), expert_num=2, quant_mode=13
    ),
    "drop_pad_mode": lambda: npu.npu_moe_init_routing_v2(
        randn(2, 8), torch.tensor([[0], [0]]), expert_num=2, drop_pad_mode=1
    ),
    "scale": lambda: npu.npu_moe_init_routing_v2(
        randn(2, 8), torch.tensor([[0], [0]]), expert_num=2, quant_mode=0
    ),
    "perm_y": lambda: npu.npu_transpose_batchmatmul(
        randn(2, 3, 4), randn(2, 4, 3), perm_y=[0, 1, 2]
    ),
    "bias": lambda: npu.npu_transpose_batchmatmul(randn(2, 3, 4), randn(2, 4, 3), bias=randn(3)),
    "fused_op_type": lambda: npu.npu_fused_matmul(randn(2, 3), randn(3, 2), fused_op_type="tan"),
    "x3": lambda: npu.npu_fused_matmul(randn(2, 3), randn(3, 2), fused_op_type="add"),
    "activation": lambda: npu.npu_ffn(randn(2, 3), randn(3, 2), randn(2, 2), "tan"),
    "x_scale": lambda: npu.npu_quant_matmul_dequant(
        randn(2, 8, dtype=torch.float16), _EIGHT, randn(4), quant_mode="pertensor"
    ),
    "group_list": lambda: npu.npu_quant_grouped_matmul_dequant(
        randn(2, 8), _EIGHT[None], randn(1, 4), torch.tensor([3])
    ),
    "rotation": lambda: npu.npu_rotate_quant(randn(2, 8), randn(3, 3)),
    "dst_dtype": lambda: npu.npu_group_quant(
        randn(2, 8), randn(1, 8), torch.tensor([2]), dst_dtype=torch.int32
    ),
    "quant_dtype": lambda: npu.npu_grouped_matmul_swiglu_quant_v2(
        _EIGHT, [_EIGHT[None]], [randn(1, 8)], randn(4), torch.tensor([4]), quant_dtype=6
    ),
    "offset": lambda: npu.npu_grouped_matmul_finalize_routing(
        _EIGHT, _EIGHT[None], torch.tensor([4]), offset=randn(1)
    ),
    "post_sample": lambda: npu.npu_top_k_top_p_sample(
        randn(1, 4), torch.tensor([1]), torch.ones(1), post_sample="multiNomial"
    ),
    "group_mode": lambda: npu.npu_swiglu_mx_quant(randn(2, 64), group_mode=1),
    "transpose_y": lambda: npu.npu_rotate_quant(randn(2, 8), randn(8, 8), transpose_y=True),
}  # fmt: skip


@pytest.mark.parametrize("argument", REFUSED)
def test_what_is_not_supported_is_named(argument):
    with pytest.raises((NotImplementedError, ValueError), match=f"argument '{argument}'"):
        REFUSED[argument]()
