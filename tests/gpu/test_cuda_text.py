"""The text of products and attention as GPU kernels, on any machine: LLVM takes it, and what makes
them fast is there."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cuda_cases import (
    LARGE_ATTENTION,
    LARGE_PRODUCTS,
    SMALL_ATTENTION,
    SMALL_PRODUCTS,
    SMALL_QUANTISED,
    AttentionCase,
    ProductCase,
    QuantisedCase,
    rms_norm,
)
from cuda_tools import HOPPER, entry_of
from models import LLAMA, MLP, Llama, Mlp, build, llama_inputs, mlp_inputs
from native_check import capture
from quantised import quantise
from torchair.codegen import program
from torchair.codegen.cuda.attention import attention
from torchair.codegen.cuda.gemv import AnyForm, GemvForm, forms, gemv
from torchair.codegen.cuda.jit import Entry, Gpu, describe, foreign, ptx
from torchair.codegen.cuda.jobs import joint_epilogue, launches_of
from torchair.codegen.cuda.nest import print_nest
from torchair.codegen.cuda.run import entry_of as bundle_entry
from torchair.codegen.cuda.target import CudaTarget
from torchair.codegen.cuda.tiles import ProductTiling, default_tiles
from torchair.codegen.loops import Access, Expr, Nest, Store, load, op
from torchair.codegen.requests import (
    Attention,
    Joint,
    MatMul,
    Partner,
    Product,
    Weight,
    stored,
)
from torchair.codegen.sizes import SizeArgument
from torchair.codegen.target import Declined, Kernel, Launch
from torchair.convert import GraphConverter
from torchair.engine.inspect.dry_run import dry_run
from torchair.operators import infer
from torchair.operators.reference import interpret
from torchair.ops.quantised import weight_quant_matmul

CHIPS = [describe(c, 80) for c in ((7, 0), (7, 5), (8, 0), (8, 6), (9, 0), (10, 3), (12, 1))]
STREAMED = "ld.global.nc.L1::no_allocate.v4.b32"


def text_of(kernel: Kernel, launch: Launch, gpu: Gpu = HOPPER) -> str:
    """PTX of a kernel that calls nobody and needs no memory of its own."""
    assert not foreign([kernel])
    assert launch.block <= 1024
    text = ptx([entry_of(kernel, launch)], gpu)
    assert ".local" not in text and "call" not in text
    return text


@pytest.mark.parametrize("gpu", CHIPS, ids=lambda gpu: gpu.name)
def test_every_chip_takes_a_product(gpu: Gpu) -> None:
    kernel, launch = ProductCase(2, 9, 512, "f16", "gate", norm="rms").generate(gpu)
    text = text_of(kernel, launch, gpu)
    assert f".target {gpu.name}" in text and STREAMED in text


def test_all_products_are_valid_text() -> None:
    made = [case.generate(HOPPER) for case in [*SMALL_PRODUCTS, *LARGE_PRODUCTS]]
    text = ptx([entry_of(*each) for each in made], HOPPER)
    assert all(f".entry {entry_of(*each).name}(" in text for each in made)
    assert ".local" not in text
    assert not foreign([kernel for kernel, _ in made])


def test_the_next_row_is_on_its_way() -> None:
    kernel, launch = ProductCase(1, 128256, 2048).generate(HOPPER)
    text = text_of(kernel, launch)
    # 8 packs of the first row before the loop, 8 of the next one in it
    assert text.count(STREAMED) == 16
    assert (launch.block, launch.per_block, launch.units) == (128, 4, (128256,))
    assert "bar.sync" not in text


def test_few_rows_are_loaded_all_at_once() -> None:
    form = GemvForm(1, 1, 4, ahead=False, in_registers=False)
    case = ProductCase(1, 2048, 2048, "bf16", "residual", norm="rms", form=form)
    kernel, launch = case.generate(HOPPER)
    text = text_of(kernel, launch)
    assert text.count("ld.volatile.shared.v4.b32") == 8  # A is read again, not kept
    assert launch.blocks(lambda word: 0) == 512  # one row for each warp


def test_long_rows_are_shared_by_warps() -> None:
    kernel, launch = ProductCase(1, 2048, 8192, "bf16", "residual").generate(HOPPER)
    text = text_of(kernel, launch)
    assert text.count(STREAMED) == 16 and text.count("bar.sync") == 1
    assert (launch.block, launch.per_block) == (128, 1)


def test_weights_come_before_the_prologue() -> None:
    kernel, launch = ProductCase(1, 8192, 2048, "bf16", "gate", norm="rms").generate(HOPPER)
    text = text_of(kernel, launch)
    first = text.index(STREAMED)
    assert text[first:].count(STREAMED) == 32
    assert first < text.index("st.shared", first) < text.index("ld.shared.v4", first)


def test_early_kernels_wait_before_they_read_what_others_wrote() -> None:
    case = ProductCase(1, 2048, 2048, norm="rms", early=True)
    kernel, launch = case.generate(HOPPER)
    text = text_of(kernel, launch)
    fast = text.index(STREAMED)
    assert launch.early and text.count("griddepcontrol.wait") == 2  # one in either version
    wait = text.index("griddepcontrol.wait", fast)  # constant weights come first
    assert "ld.global.v4" in text[wait:] and "ld.global.v4" not in text[fast:wait]
    nest = print_nest(rms_norm(4, 64, "f32"), HOPPER, early=True)
    for kernel, launch in (AttentionCase(8, 2, 1, 64, 64, early=True).generate(HOPPER), nest):
        text = text_of(kernel, launch)
        assert launch.early and text.index("griddepcontrol.wait") < text.index("ld.global")
    kernel, launch = case.generate(describe((8, 0), 80))
    assert not launch.early and "griddepcontrol" not in kernel.text


PREDICATED_LOAD = re.compile(r'asm sideeffect "@\$\d+ ld[^"]*", "([^"]*)"')


def test_parts_of_a_persistent_kernel_leave_no_register_undefined() -> None:
    """It would have a value from before for the assembler, which spills others for that."""
    gpu = dataclasses.replace(HOPPER, persistent=True)
    cases: list[Any] = [*SMALL_PRODUCTS, *SMALL_ATTENTION, *SMALL_QUANTISED]
    texts = [case.generate(gpu)[0].text for case in cases]
    assert not any(re.search(r" = phi .*\[ poison", text) for text in texts)
    found = [x.split(",") for text in texts for x in PREDICATED_LOAD.findall(text)]
    assert found
    for constraints in found:
        results = [k for k, x in enumerate(constraints) if x == "=r"]
        assert constraints[-len(results) :] == [str(k) for k in results]


def test_turns_are_even() -> None:
    _, launch = ProductCase(1, 128256, 2048).generate(HOPPER)
    blocks, rows = launch.blocks(lambda word: 0), 128256 // launch.per_block
    turns = -(-rows // launch.most)
    assert turns > 1 and (turns - 1) * blocks < rows <= turns * blocks
    _, launch = ProductCase(1, 128256, 2048, counted=True).generate(HOPPER)
    assert launch.blocks(lambda word: 128256) == blocks


MATMUL = MatMul("bf16", 1, 1, 64, 64, (64, 64, 1), (0, 1, 64))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "f64"}, "f64"),
        ({"batch": 2}, "batch of 2"),
        ({"m": 5}, "5 rows"),
        ({"m": SizeArgument(9)}, "rows"),
        ({"k": SizeArgument(9)}, "rows of"),
        ({"k": 60}, "rows of 60"),
        ({"a": (64, 64, 2)}, "strides"),
        ({"b": (0, 64, 1)}, "a matrix with strides"),
        ({"b": (0, 1, 66)}, "a matrix with strides"),
    ],
    ids=str,
)
def test_what_is_not_served_is_declined(change: dict[str, object], reason: str) -> None:
    matmul = dataclasses.replace(MATMUL, **change)
    with pytest.raises(Declined, match=reason):
        gemv(Product(matmul, Nest((1, 64), ())), HOPPER)


QUANTISED = dataclasses.replace(MATMUL, constant="nk", weight=Weight(4, 64, "bf16", ""))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"m": 5}, "5 rows"),
        ({"k": 80, "weight": Weight(8, 80, "bf16", "")}, "rows of 80"),
        ({"weight": Weight(8, 16, "bf16", "")}, "groups of 16"),
        ({"constant": ""}, "not known"),
        ({"a": (64, 64, 2)}, "strides"),
        ({"dtype": "f64"}, "f64"),
    ],
    ids=str,
)
def test_integers_that_are_not_served_are_declined(change: dict[str, object], reason: str) -> None:
    matmul = dataclasses.replace(QUANTISED, **change)
    with pytest.raises(Declined, match=reason):
        gemv(Product(matmul, Nest((1, 64), ())), HOPPER)


@pytest.mark.parametrize("gpu", CHIPS, ids=lambda gpu: gpu.name)
def test_integers_need_tensor_cores_for_bytes(gpu: Gpu) -> None:
    product = Product(QUANTISED, stored((1, 64), (64, 1), "bf16", 5))
    if gpu.capability < (8, 0):
        with pytest.raises(Declined, match="tensor cores"):
            gemv(product, gpu)
        return
    kernel, launch = gemv(product, gpu)
    assert "mma.sync.aligned.m16n8k32" in ptx([Entry((kernel,), launch.block)], gpu)


def test_forms_to_be_measured_differ() -> None:
    def found(matmul: MatMul, partner: Partner | None = None) -> Sequence[AnyForm]:
        return forms(Joint(Product(matmul, Nest((1, 64), ())), partner), HOPPER)

    integers = dataclasses.replace(QUANTISED, k=4096, b=(0, 1, 4096))
    for each in (found(MATMUL), found(MATMUL, Partner(9, MATMUL.b)), found(integers)):
        assert len(set(each)) == len(each) > 4
    wide = dataclasses.replace(MATMUL, k=8192, n=2048, b=(0, 1, 8192))
    assert found(wide)[0] == GemvForm(1, 4, 4)
    assert {form.split for form in found(wide)} == {4, 8}


def test_blocks_that_count_on_each_other_have_room_for_all() -> None:
    alone, launch = ProductCase(1, 2048, 2048).generate(HOPPER)
    pair, both = ProductCase(1, 8192, 2048, epilogue="gate").generate(HOPPER)
    assert ".minnctapersm 4" in text_of(alone, launch)
    assert ".minnctapersm 2" in text_of(pair, both)
    assert together((alone, launch), (pair, both)).resident == 2


def together(*made: tuple[Kernel, Launch]) -> Entry:
    """What a launch of several kernels runs."""
    jobs: Any = [SimpleNamespace(kernel=kernel, launch=launch) for kernel, launch in made]
    return bundle_entry(jobs, HOPPER)


def test_all_blocks_of_kernels_side_by_side_have_room_at_once() -> None:
    sizes = 4096, 1024, 1024  # of queries, keys and values of a layer of an 8B model
    made = [QuantisedCase(1, n, 4096, 4, 128, norm="rms").generate(HOPPER) for n in sizes]
    blocks = sum(launch.most_blocks for _, launch in made)
    assert [launch.resident for _, launch in made] == [2, 1, 1]
    entry = together(*made)
    assert 2 * HOPPER.multiprocessors < blocks <= entry.resident * HOPPER.multiprocessors
    assert ".minnctapersm 3" in ptx([entry], HOPPER)


@pytest.mark.parametrize(("bits", "group"), [(8, 0), (4, 128)])
@pytest.mark.parametrize(
    ("n", "k", "how"),
    [(4096, 4096, "residual"), (14336, 4096, "gate"), (128256, 4096, "plain")],
)
def test_default_tiles_keep_a_gpu_busy(n: int, k: int, how: str, bits: int, group: int) -> None:
    """Many warps and packs on their way, and registers that are filled again in place: no loop
    copies the packs of one chunk to those of the next."""
    case = QuantisedCase(1, n, k, bits, group, epilogue=how)
    form = default_tiles(case.matmul, HOPPER, how == "gate")
    assert ProductTiling(case.matmul, form, 1 + (how == "gate")).busy(HOPPER) >= 0.5
    kernel, launch = case.generate(HOPPER)
    assert launch.blocks(lambda word: 0) == min(-(-n // 16), launch.most)
    text = text_of(kernel, launch)
    copies = r"mov\.[bu]32\s+%r\d+, %r\d+;"
    assert not re.search(copies, text[text.index("mma.sync") :])
    assert "@%p" in text[: text.index(STREAMED)].splitlines()[-1]


def test_default_tiles_leave_room_for_rows_of_a() -> None:
    case = QuantisedCase(4, 300, 2048, 4, 128, "", "f32", "f32", "gate", "rms")
    assert text_of(*case.generate(HOPPER))


def test_a_form_must_fit() -> None:
    with pytest.raises(ValueError, match="no form"):
        ProductCase(1, 8, 64, form=GemvForm(1, 3, 4)).generate(HOPPER)


# ---- attention ----


@pytest.mark.parametrize("gpu", CHIPS, ids=lambda gpu: gpu.name)
def test_every_chip_takes_attention(gpu: Gpu) -> None:
    kernel, launch = AttentionCase(8, 2, 1, 512, 64, "f16", mask="bool").generate(gpu)
    text = text_of(kernel, launch, gpu)
    assert f".target {gpu.name}" in text and STREAMED in text
    assert (launch.cluster > 1) == gpu.has_clusters == ("mapa" in text)


def test_all_attention_is_valid_text() -> None:
    made = [case.generate(HOPPER) for case in [*SMALL_ATTENTION, *LARGE_ATTENTION]]
    text = ptx([entry_of(*each) for each in made], HOPPER)
    assert all(f".entry {entry_of(*each).name}(" in text for each in made)
    assert ".local" not in text
    assert not foreign([kernel for kernel, _ in made])


def test_a_decode_step_is_shared_by_a_cluster() -> None:
    kernel, launch = AttentionCase(32, 8, 1, 1024, 64, mask="bool").generate(HOPPER)
    text = text_of(kernel, launch)
    assert (launch.block, launch.cluster, launch.blocks(lambda word: 0)) == (128, 8, 128)
    # a key head has two clusters; a lane has four keys and four values before the loop, as many
    # in it, and two queries
    assert text.count(STREAMED) == 18
    assert text.count("barrier.cluster.wait") == 2 and text.count("bar.sync") == 1


ATTENTION = Attention(
    "bf16",
    1,
    8,
    2,
    1,
    64,
    64,
    64,
    (512, 64, 64, 1),
    (0, 4096, 64, 1),
    (0, 4096, 64, 1),
    (512, 64, 64, 1),
    0.125,
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "f64"}, "f64"),
        ({"length": 5}, "5 queries"),
        ({"length": SizeArgument(7)}, "queries"),
        ({"heads": SizeArgument(7)}, "heads over 2"),
        ({"heads": 9}, "9 heads"),
        ({"width": 60}, "60"),
        ({"value_width": 512}, "512 features"),
        ({"k": (0, 4096, 1, 64)}, "no neighbours"),
    ],
    ids=str,
)
def test_attention_that_is_not_served_is_declined(change: dict[str, object], reason: str) -> None:
    with pytest.raises(Declined, match=reason):
        attention(dataclasses.replace(ATTENTION, **change), HOPPER)


# ---- whole graphs


def test_a_pair_of_products_reads_the_first_as_it_is_stored() -> None:
    given = Expr("given", "f32", data=0)
    first = Nest((8,), (Store(Access(1, "bf16", (1,)), op("silu", given)),))
    read = load(Access(0, "bf16", (1,)))
    second = Nest((8,), (Store(Access(1, "bf16", (1,)), op("mul", given, read)),))
    pair = joint_epilogue(first, second, 2, [(0, 0), (7, 0)], [(7, 0), (8, 0)])
    assert pair is not None
    gate, factor = pair.stores[0].value, pair.stores[1].value.args[1]
    assert (factor.kind, factor.data, factor.args) == ("narrow", "bf16", (gate,))


@pytest.mark.parametrize("name", ("mlp", "llama", "quantised llama"))
def test_launches_of_a_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms are prologues, gated products pairs, and what is independent shares a launch. Where
    buffers lie makes no difference."""
    config = dataclasses.replace(LLAMA["tiny grouped"], head_dim=64, dim=256, ffn=512)
    kinds = {"mlp": (Mlp, MLP["16 layers"]), "llama": (Llama, config)}
    model = build(*kinds[name.split()[-1]]).to(torch.bfloat16)
    if name.startswith("quantised"):
        quantise(model, bits=4, group=128)
    inputs = mlp_inputs(MLP["16 layers"], 1) if name == "mlp" else llama_inputs(config, 1, start=3)
    given = [x.to(torch.bfloat16) if x.is_floating_point() else x for x in inputs]
    torch._dynamo.reset()
    with capture() as found, torch.no_grad():
        torch.compile(model, backend="torchair")(*given)
    session = found[0].session
    for node in session.graph.nodes:  # as if the model were on a GPU
        for value in node.outputs:
            value.device_type = "NPU"
    assigned = session.loaded.state.assigned
    made = dry_run(session.graph, HOPPER, assigned, frozen=session.current.units.frozen)
    assert not [s for s in made.plan.steps if s.native is None and s.kind != "view"]
    for launch in {e.name: b for b in made.launches for e in [bundle_entry(b, HOPPER)]}.values():
        assert ".local" not in made.ptx(launch)
    jobs = [job for launch in made.launches for job in launch]
    threes = [j.kernel.entry for j in jobs if len(j.steps) == 3]  # norm, gate and up
    assert len(threes) == (0 if name == "mlp" else config.layers)
    assert {e.startswith("weightquant") for e in threes} <= {"quantised" in name}
    if name == "mlp":  # a layer is a launch; the last normalisation is one more
        assert len(made.launches) == 17
    else:  # norm with products, rope with a cache, the other cache, attention, output, gated, down
        assert len(made.launches) <= 3 + 7 * config.layers
    placed = program.range_of
    monkeypatch.setattr(
        program, "range_of", lambda a: (a.slot, 0, 1) if a.kind == "arena" else placed(a)
    )
    apart = [b for _, part in launches_of(made.plan, CudaTarget(0, HOPPER).joined) for b in part]
    assert str(dataclasses.replace(made, launches=apart)) == str(made)


@pytest.mark.parametrize("kind", ("flash", "efficient", "cudnn"))
def test_attention_of_gpu_tensors_is_one_operator(kind: str) -> None:
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention").default
    more = () if kind == "flash" else (None, False)
    with FakeTensorMode():
        q = torch.empty(1, 8, 16, 64, device="cuda", dtype=torch.bfloat16)
        gm = make_fx(lambda q: (operator(q, q, q, *more)[0],))(q)
        graph = GraphConverter(gm, "g", infer).run(q).graph
    assert "FusedInferAttentionScore" in {n.type for n in graph.nodes}
    assert "TorchCall" not in {n.type for n in graph.nodes}


def tiled(integers: torch.Tensor, inner: int) -> torch.Tensor:
    """Integers [n, k] of 0 to 15 as torch packs them for tensor cores, number by number."""
    n, k = integers.shape
    packed = torch.zeros(n // 8, k // (inner * 16), 32, inner // 2, dtype=torch.int64)
    for row, column in itertools.product(range(n), range(k)):
        outer, rest = divmod(column, inner * 16)
        word, rest = divmod(rest, 32)
        eighth, rest = divmod(rest, 8)
        lane, odd = 4 * (row % 8) + rest // 2, rest % 2
        value = int(integers[row, column]) << 4 * (eighth + 4 * odd)
        packed[row // 8, outer, lane, word] += value
    return packed.to(torch.int32)


@pytest.mark.parametrize("inner", (2, 8))
def test_weights_in_tiles_of_tensor_cores_are_quantised_weights(inner: int) -> None:
    n, k, group = 16, 256, 64
    integers = torch.randint(0, 16, (n, k))
    scales = torch.rand(k // group, n).bfloat16()
    scales[1, 3] = 0
    pairs = torch.stack([scales, torch.randn(k // group, n).bfloat16()], -1)
    given = torch.randn(3, k).bfloat16(), tiled(integers, inner), pairs
    with FakeTensorMode():
        x, packed, both = (torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in given)
        gm = make_fx(lambda *a: (torch.ops.aten._weight_int4pack_mm(a[0], a[1], group, a[2]),))(
            x, packed, both
        )
        graph = GraphConverter(gm, "g", infer).run(x, packed, both).graph
    assert "TorchCall" not in {node.type for node in graph.nodes}
    (got,) = interpret(graph, list(given))
    factor, shift = (pairs[..., i].t().double().repeat_interleave(group, 1) for i in (0, 1))
    right = given[0].double() @ ((integers - 8) * factor + shift).t()
    assert (got.double() - right).abs().max() <= 2**-8 * right.abs().max()


def test_many_rows_of_a_gpu_are_multiplied_in_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(7, 64).bfloat16(), torch.randint(-128, 128, (64, 32)).to(torch.int8)
    scale, bias = torch.rand(2, 32).bfloat16(), torch.randn(32)
    numbers = (weight.float() * scale.float().repeat_interleave(32, 0)).bfloat16()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    got = weight_quant_matmul(x, weight, scale, bias=bias, group=32)
    assert torch.equal(got, ((x @ numbers).float() + bias).bfloat16())
