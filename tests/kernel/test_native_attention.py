"""Attention kernels against float64 and against torch's own kernel for CPUs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from torchair.codegen.cpu.attention.kernel import attention
from torchair.codegen.cpu.jit import Library, host, module_text, run_kernel
from torchair.codegen.requests import Attention
from torchair.codegen.sizes import Size, SizeArgument
from torchair.codegen.text.writer import Machine

NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.bool: "bool"}
CLOSE = {torch.float32: 4e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
DTYPES = list(CLOSE)
INF = math.inf
FIRST_WORD = 7  # of the run-time sizes
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass
class Words:
    """Run-time sizes: gives out words and remembers their values."""

    values: list[int] = field(default_factory=list)

    def __call__(self, *sizes: int) -> tuple[SizeArgument, ...]:
        first = FIRST_WORD + len(self.values)
        self.values += sizes
        return tuple(SizeArgument(first + i) for i in range(len(sizes)))


def spec_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Attention:
    (batch, heads, length, width), span = q.shape, k.shape[2]
    spread = mask.expand(batch, heads, length, span) if mask is not None else None
    return Attention(
        NAMES[q.dtype],
        batch,
        heads,
        k.shape[1],
        length,
        span,
        width,
        v.shape[3],
        q.stride(),
        k.stride(),
        v.stride(),
        out.stride(),
        width**-0.5 if scale is None else scale,
        causal,
        None if mask is None else NAMES[mask.dtype],
        (0, 0, 0, 0) if spread is None else spread.stride(),
        None if lse is None else lse.stride(),
    )


def at_run_time(spec: Attention, features: bool) -> tuple[Attention, list[int]]:
    """The same spec with all sizes given at run time, the strides of features if wanted."""
    words = Words()

    def strides(s: tuple[Size, ...]) -> tuple[Size, ...]:
        kept = len(s) if features else 3
        return (*words(*s[:kept]), *s[kept:])

    names = ("batch", "heads", "kv_heads", "length", "span")
    sizes = dict(zip(names, words(*(getattr(spec, n) for n in names)), strict=True))
    moved = {n: strides(getattr(spec, n)) for n in ("q", "k", "v", "out", "mask_strides")}
    lse = None if spec.lse is None else words(*spec.lse)
    return dataclasses.replace(spec, **sizes, **moved, lse=lse), words.values


GUARD = 256


def run(library: Library, spec: Attention, tensors: list[Tensor | None], more=(), threads: int = 1):
    """Run a spec on (q, k, v, mask, out, lse); what lies behind its work memory stays as it is."""
    made = attention(spec, library.machine)
    size = made.scratch * threads
    scratch = torch.full((size + GUARD + 64,), 0xFF, dtype=torch.uint8)
    shift = -scratch.data_ptr() % 64
    words = [0 if x is None else x.data_ptr() for x in tensors]
    run_kernel(library, made.kernel, [*words, scratch.data_ptr() + shift, *more], threads)
    assert (scratch[shift + size :] == 0xFF).all()


def compute(library, q, k, v, threads=1, dynamic=None, **options):
    """Both outputs for these tensors; `dynamic` may be "sizes" or "all"."""
    out = torch.full((*q.shape[:3], v.shape[3]), 99.0, dtype=q.dtype)
    lse = torch.full(q.shape[:3], 99.0)
    spec, more = spec_of(q, k, v, out, lse, **options), []
    if dynamic:
        spec, more = at_run_time(spec, dynamic == "all")
    run(library, spec, [q, k, v, options.get("mask"), out, lse], more, threads)
    return out, lse


def truth(q, k, v, mask=None, causal=False, scale=None):
    """The same in float64; a query that sees no key has zeros."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -INF)
    elif mask is not None:
        scores = scores + mask.double()
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -INF)
    blind = (scores == -INF).all(-1)
    out = scores.softmax(-1).masked_fill(blind[..., None], 0) @ v
    return out, scores.logsumexp(-1).masked_fill(blind, 0)


def check(got, wanted, dtype):
    for x, y, bound in zip(got, wanted, (CLOSE[dtype], 1e-5), strict=True):
        torch.testing.assert_close(x.double(), y, atol=bound, rtol=bound)


def random(dtype, batch, heads, kv_heads, length, span, width, value_width=None):
    value_width = value_width or width
    shapes = ((heads, length, width), (kv_heads, span, width), (kv_heads, span, value_width))
    return tuple(torch.randn(batch, *shape).to(dtype) for shape in shapes)


def mask_like(kind: str, dtype, batch, heads, length, span) -> dict:
    """Options with a mask of a kind; some queries see nothing, some blocks nobody sees."""
    if kind in ("none", "causal"):
        return {"causal": kind == "causal"}
    if kind == "keys":
        return {"mask": torch.arange(span).expand(batch, 1, 1, span) < (span + 1) // 2}
    seen = torch.rand(batch, heads if kind == "heads" else 1, length, span) < 0.7
    seen[:, :, length // 2] = False
    seen[..., span // 3 : span // 2] = False
    if kind == "bool":
        return {"mask": seen}
    added = torch.randn(seen.shape).masked_fill(~seen, -INF)
    return {"mask": added.to(dtype), "causal": kind == "both"}


@pytest.fixture(scope="module")
def library() -> Library:
    return Library()


@pytest.fixture(autouse=True)
def _seeded_on_one_thread() -> Iterator[None]:
    """The tensors are small; waiting for other threads would take longer than computing."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---- sizes ----

# batch, heads, kv_heads, length, span, width, value_width
DECODE = [
    (1, 12, 4, 1, 512, 64, 64),
    (2, 2, 2, 4, 37, 40, 24),
    (1, 4, 2, 3, 300, 96, 96),
    (3, 1, 1, 1, 5, 256, 200),
    (1, 1, 1, 1, 1, 1, 1),
    (1, 8, 1, 1, 16, 72, 33),
]
PREFILL = [
    (1, 2, 2, 64, 64, 64, 64),
    (2, 6, 2, 37, 131, 40, 40),
    (1, 1, 1, 9, 5, 80, 256),
    (1, 3, 3, 70, 200, 33, 17),
    (1, 2, 1, 100, 66, 256, 96),
    (1, 1, 1, 16, 1, 1, 1),
]


@pytest.mark.parametrize("shape", DECODE + PREFILL, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_without_mask(library, dtype, shape):
    inputs = random(dtype, *shape)
    wanted = truth(*inputs)
    for threads in (1, 3):
        check(compute(library, *inputs, threads=threads), wanted, dtype)


@pytest.mark.parametrize("kind", ["causal", "keys", "bool", "added", "heads", "both"])
@pytest.mark.parametrize("shape", [DECODE[2], PREFILL[1], PREFILL[3]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_masks(library, dtype, shape, kind):
    inputs = random(dtype, *shape)
    options = mask_like(kind, dtype, shape[0], shape[1], shape[3], shape[4])
    got = compute(library, *inputs, threads=2, **options)
    check(got, truth(*inputs, **options), dtype)


@pytest.mark.parametrize("length", [2, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=NAMES.get)
def test_mask_of_another_type(library, dtype, length):
    inputs = random(dtype, 1, 2, 2, length, 45, 32)
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        mask = torch.randn(1, 1, length, 45).to(kind)
        check(compute(library, *inputs, mask=mask), truth(*inputs, mask=mask), dtype)


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
@pytest.mark.parametrize("length", [1, 20])
def test_scale(library, length, scale):
    inputs = random(torch.float32, 1, 2, 2, length, 70, 16)
    check(compute(library, *inputs, scale=scale), truth(*inputs, scale=scale), torch.float32)


@pytest.mark.parametrize("bits", [256, 128])
@pytest.mark.parametrize("kind", ["none", "causal", "added", "bool"])
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_narrower_vectors(dtype, kind, bits):
    machine = dataclasses.replace(host(), bits=bits, registers=16, dot_bf16=False)
    library = Library(machine)
    for shape in (DECODE[2], PREFILL[1]):
        inputs = random(dtype, *shape)
        options = mask_like(kind, dtype, shape[0], shape[1], shape[3], shape[4])
        got = compute(library, *inputs, threads=2, **options)
        check(got, truth(*inputs, **options), dtype)


# ---- run-time sizes ----


@pytest.mark.parametrize("kind", ["none", "causal", "keys", "bool", "added"])
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_one_kernel_for_all_sizes(library, dtype, kind):
    compute(library, *random(dtype, 1, 1, 1, 1, 1, 24), **mask_like(kind, dtype, 1, 1, 1, 1))
    entries = set()
    for batch, heads, kv_heads, length, span in (
        (1, 12, 4, 1, 100),
        (2, 4, 4, 3, 17),
        (1, 3, 1, 3, 64),
        (2, 4, 2, 33, 130),
        (1, 1, 1, 70, 1),
        (1, 4, 2, 3, 0),
        (1, 4, 2, 30, 0),
        (0, 2, 2, 4, 4),
        (1, 0, 0, 4, 4),
        (1, 2, 2, 0, 4),
    ):
        inputs = random(dtype, batch, heads, kv_heads, length, span, 24)
        options = {"causal": kind == "causal"}
        if kind not in ("none", "causal"):
            full = mask_like(kind, dtype, batch, heads, max(length, 1), span)["mask"]
            options["mask"] = full.expand(batch, 1, max(length, 1), span)[:, :, :length]
        got = compute(library, *inputs, threads=3, dynamic="sizes", **options)
        wanted = truth(*inputs, **options) if heads else tuple(x.double() for x in got)
        check(got, wanted, dtype)
        spec = at_run_time(spec_of(*inputs, got[0], got[1], **options), False)[0]
        entries.add(attention(spec, library.machine).kernel.entry)
    assert len(entries) == 1


@pytest.mark.parametrize("span", [0, 9])
@pytest.mark.parametrize("length", [0, 2, 30])
def test_nothing_to_do(library, length, span):
    inputs = random(torch.float32, 2, 2, 1, length, span, 16)
    check(compute(library, *inputs, threads=2), truth(*inputs), torch.float32)
    for batch, heads in ((0, 2), (2, 0)):
        out, lse = compute(library, *random(torch.float32, batch, heads, heads, length, span, 16))
        assert out.numel() == lse.numel() == 0


# ---- layouts ----


@pytest.mark.parametrize("dynamic", [None, "sizes", "all"])
@pytest.mark.parametrize("length", [2, 50])
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_heads_inside_positions(library, dtype, length, dynamic):
    packed = torch.randn(2, length, 3, 4, 40).to(dtype)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    mask = torch.randn(length, 4).to(dtype).t()[None, :, None, :].expand(2, 4, length, length)
    got = compute(library, q, k, v, threads=2, dynamic=dynamic, mask=mask)
    check(got, truth(q, k, v, mask=mask), dtype)


@pytest.mark.parametrize("length", [3, 21])
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("which", ["q", "k", "v", "out", "mask"])
def test_strided_features(library, dtype, length, which):
    q, k, v = random(dtype, 1, 4, 2, length, 39, 36)
    mask = torch.randn(1, 4, length, 39).to(dtype)
    out, lse = torch.full_like(q, 99.0), torch.full((1, 4, length), 99.0)
    tensors = {"q": q, "k": k, "v": v, "mask": mask, "out": out}
    tensors[which] = tensors[which].transpose(2, 3).contiguous().transpose(2, 3)
    q, k, v, mask, out = tensors.values()
    spec = spec_of(q, k, v, out, lse, mask)
    run(library, spec, [q, k, v, mask, out, lse], threads=2)
    check((out, lse), truth(q, k, v, mask=mask), dtype)


def test_outputs_in_other_layouts(library):
    for length in (2, 30):
        q, k, v = random(torch.float32, 2, 3, 3, length, 20, 24)
        out = torch.full((2, length, 5, 24), 99.0)[:, :, 1:4].transpose(1, 2)
        lse = torch.full((2, length, 3), 99.0).transpose(1, 2)
        run(library, spec_of(q, k, v, out, lse), [q, k, v, None, out, lse])
        check((out, lse), truth(q, k, v), torch.float32)
        assert (out._base[:, :, [0, 4]] == 99).all()


def test_without_lse(library):
    for length in (1, 30):
        q, k, v = random(torch.float32, 1, 2, 2, length, 20, 24)
        out = torch.full_like(q, 99.0)
        run(library, spec_of(q, k, v, out), [q, k, v, None, out, None])
        torch.testing.assert_close(out.double(), truth(q, k, v)[0], atol=4e-6, rtol=4e-6)


# ---- special values ----


@pytest.mark.parametrize("length", [3, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_like_torch(library, dtype, length):
    """Rows without keys, very low and infinite masks, and what is not a number."""
    q, k, v = random(dtype, 1, 2, 2, length, 600, 16)
    mask = torch.zeros(1, 2, length, 600).to(dtype)
    mask[0, 0, 0] = -INF
    mask[0, 0, 1] = torch.finfo(dtype).min
    mask[0, 0, 2, :590] = -INF
    mask[0, 1, 0, 5] = INF
    mask[0, 1, 1, 300] = math.nan
    mask[0, 1, 2, 400:] = torch.finfo(dtype).min
    got, wanted = compute(library, q, k, v, mask=mask), flash(q, k, v, attn_mask=mask)
    bound = CLOSE[dtype]
    torch.testing.assert_close(got[0], wanted[0], atol=bound, rtol=bound, equal_nan=True)
    torch.testing.assert_close(got[1], wanted[1], atol=1e-4, rtol=1e-4, equal_nan=True)
    assert (got[0][0, 0, 0] == 0).all() and got[1][0, 0, 0] == 0
    assert got[0][0, 1, :2].isnan().all()


@pytest.mark.parametrize("length", [3, 33])
def test_a_query_without_keys_in_bool(library, length):
    q, k, v = random(torch.float32, 1, 2, 2, length, 100, 16)
    mask = torch.rand(1, 1, length, 100) < 0.5
    mask[..., 1, :] = False
    got = compute(library, q, k, v, mask=mask)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(got[0], wanted, atol=4e-6, rtol=4e-6)
    assert (got[0][:, :, 1] == 0).all() and (got[1][:, :, 1] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 4, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_random_like_torch(library, dtype, length, causal):
    q, k, v = random(dtype, 2, 4, 2, length, 90, 64)
    got, wanted = compute(library, q, k, v, causal=causal), flash(q, k, v, is_causal=causal)
    torch.testing.assert_close(got[0], wanted[0], atol=CLOSE[dtype], rtol=CLOSE[dtype])
    bound = 1e-5 if dtype == torch.float32 else 1e-3  # torch rounds the sums of narrow types
    torch.testing.assert_close(got[1], wanted[1], atol=bound, rtol=bound)


def test_large_scores(library):
    for length in (2, 20):
        q, k, v = random(torch.float32, 1, 1, 1, length, 80, 8)
        wanted = truth(q * 1000, k, v)
        got = compute(library, q * 1000, k, v)
        torch.testing.assert_close(got[0].double(), wanted[0], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("length", [1, 4, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_unseen_keys_are_not_read(library, dtype, length, kind):
    """What the mask hides in whole blocks may be anything, as in a cache not yet filled."""
    q, k, v = random(dtype, 1, 2, 1, length, 512, 32)
    seen = torch.zeros(1, 1, length, 512, dtype=torch.bool)
    seen[..., 128:256] = True
    mask = seen if kind == torch.bool else torch.zeros(seen.shape).masked_fill(~seen, -INF)
    wanted = truth(q, k, v, mask=mask)
    for x in (k, v):
        x[:, :, :128] = x[:, :, 256:] = math.nan
    check(compute(library, q, k, v, mask=mask), wanted, dtype)


# ---- other processors ----


@pytest.mark.parametrize("length", [1, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_code_for_arm_has_no_foreign_instructions(dtype, length):
    import llvmlite.binding as llvm

    machine = Machine("generic", "", 128, 32, fma=True, arch="aarch64")
    q, k, v = random(dtype, 1, 2, 1, length, 64, 40)
    spec = spec_of(q, k, v, q, mask=torch.zeros(1, 1, length, 64, dtype=torch.bool))
    text = module_text([attention(spec, machine).kernel], machine)
    assert "x86" not in text
    llvm.parse_assembly(text).verify()
