"""Kernels for aarch64 under qemu against float64: a slice of `make aarch64`, where qemu is."""

from __future__ import annotations

import pytest
import torch

import qemu_aarch64
from torchair.codegen.cpu.jit import describe
from torchair.codegen.cpu.matmul.kernel import product
from torchair.codegen.cpu.processors import processor_named
from torchair.codegen.requests import MatMul, Product, stored
from torchair.codegen.target import Generated

needs_qemu = pytest.mark.skipif(
    qemu_aarch64.why_not() is not None, reason=str(qemu_aarch64.why_not())
)
DOTS = ("aarch64", "aarch64+bf16+dotprod", "aarch64+bf16+dotprod+i8mm")
LIBRARIES = {
    name: qemu_aarch64.QemuLibrary(processor_named(name).machine)
    for name in (*DOTS, "aarch64+sve256", "aarch64+sve512")
}


def launched(made: Generated, name: str, tensors: list[torch.Tensor]) -> None:
    """A kernel with two threads and scratch memory as its third argument."""
    memory = torch.zeros(2 * made.scratch + 128, dtype=torch.uint8)
    tensors = [*tensors[:2], memory, *tensors[2:]]
    words = [t.data_ptr() + (-t.data_ptr() % 64 if t is memory else 0) for t in tensors]
    qemu_aarch64.run_kernel(LIBRARIES[name], made.kernel, words, 2)


@needs_qemu
@pytest.mark.parametrize("name", DOTS)
@pytest.mark.parametrize("m", [1, 2, 13])
def test_products_of_bfloat16(name, m):
    machine, n = LIBRARIES[name].machine, 40
    for k in (68, 7000) if m == 13 else (68,):
        a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
        spec = MatMul("bf16", 1, m, n, k, (0, k, 1), (0, 1, k), "nk")
        end = stored((1, m, n), (0, n, 1), "f32", 3, "f32")
        made, out = product(Product(spec, end), machine, "arm"), torch.full((m, n), 7.0)
        launched(made, name, [a, made.pack[1](b) if made.pack else b, out])
        right, size = a.double() @ b.double().t(), a.double().abs() @ b.double().abs().t()
        assert torch.all((out.double() - right).abs() <= 1e-6 * size)
        assert ("bfmmla" in made.kernel.text) == (machine.mmla_bf16 and bool(made.pack))


@needs_qemu
@pytest.mark.parametrize("name", ["aarch64", "aarch64+sve256", "aarch64+sve512"])
def test_products_of_float32(name):
    m, n, k = 13, 40, 68
    a, b, out = torch.randn(m, k), torch.randn(n, k), torch.full((m, n), 7.0)
    spec = MatMul("f32", 1, m, n, k, (0, k, 1), (0, 1, k), "nk")
    end = stored((1, m, n), (0, n, 1), "f32", 3, "f32")
    made = product(Product(spec, end), LIBRARIES[name].machine, "arm")
    launched(made, name, [a, made.pack[1](b), out])
    torch.testing.assert_close(out.double(), a.double() @ b.double().t(), rtol=1e-5, atol=1e-5)


@needs_qemu
@pytest.mark.parametrize("name", DOTS)
def test_products_of_bytes(name):
    machine, n, k = LIBRARIES[name].machine, 40, 64
    for m in (1, 7):
        a, b = (torch.randint(-128, 128, (rows, k), dtype=torch.int8) for rows in (m, n))
        spec = MatMul("i8", 1, m, n, k, (0, k, 1), (0, 1, k), "nk")
        end = stored((1, m, n), (0, n, 1), "i32", 4, "i32")
        made = product(Product(spec, end), machine, "arm")
        out = torch.zeros(m, n, dtype=torch.int32)
        launched(made, name, [a, made.pack[1](b), b, out])
        assert torch.equal(out.long(), a.long() @ b.long().t())
        used = "smmla" if machine.mmla_i8 else "sdot" if machine.dot_i8 else "mul <4 x i32>"
        assert used in made.kernel.text


def test_features_of_the_processor_are_seen():
    has = {"bf16": True, "dotprod": True, "i8mm": True}
    machine = describe("neoverse-v1", has, "", "aarch64")
    assert machine.dot_bf16 and machine.dot_i8 and machine.mmla_bf16 and machine.mmla_i8
    assert not machine.shifts_bytes
    plain = describe("cortex-a72", {}, "", "aarch64")
    assert not (plain.dot_bf16 or plain.dot_i8 or plain.mmla_bf16 or plain.mmla_i8)
