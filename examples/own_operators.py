"""Operators of your own in a graph: one that returns a new tensor, one that updates in place.

Run it: `python examples/own_operators.py`. docs/custom_ops.md explains each step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torchair
from torchair import ge

library = torch.library.Library("example", "FRAGMENT")


def show(title: str, model: Callable[..., Any], *args: torch.Tensor) -> None:
    """Compile a model, compare it with eager, print the nodes of its operators."""
    torch._dynamo.reset()
    print(f"\n== {title}\n")
    with tempfile.TemporaryDirectory() as folder:
        config = torchair.CompilerConfig()
        config.debug.graph_dump.type = "py"
        config.debug.graph_dump.path = folder
        compiled = torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config))
        copies = [t.clone() for t in args]
        torch.testing.assert_close(compiled(*args), model(*copies))
        torch.testing.assert_close(list(args), copies)
        (file,) = Path(folder).glob("dynamo_original_*.py")
        lines = file.read_text().splitlines()
    own = ("TorchCall", "custom_op", "TensorMove", "Assign")
    print(*(line for line in lines if any(f"ge.{name}(" in line for name in own)), sep="\n")


# ---- an operator that returns a new tensor: schema, kernel, and a kernel for fake tensors

library.define("scaled_add(Tensor x, Tensor y, *, float alpha=1.0) -> Tensor")


@torch.library.impl(library, "scaled_add", "CompositeExplicitAutograd")
def scaled_add(x: torch.Tensor, y: torch.Tensor, *, alpha: float = 1.0) -> torch.Tensor:
    return x + alpha * y


@torch.library.register_fake("example::scaled_add", lib=library)
def scaled_add_fake(x: torch.Tensor, y: torch.Tensor, *, alpha: float = 1.0) -> torch.Tensor:
    return torch.empty_like(x)


def add_model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.ops.example.scaled_add(x * 2, y, alpha=0.5)


def declare_scaled_add() -> None:
    ge.register_operator(
        "ScaledAdd", inputs=["x", "y"], outputs=["z"], attrs={"alpha": ("Float", 1.0)}
    )


def convert_scaled_add() -> None:
    @torchair.register_fx_node_ge_converter(torch.ops.example.scaled_add.default)
    def convert(x: ge.Tensor, y: ge.Tensor, *, alpha: float = 1.0) -> ge.Tensor:
        return ge.custom_op("ScaledAdd", x, y, alpha)


def give_scaled_add_a_kernel() -> None:
    def kernel(x: torch.Tensor, y: torch.Tensor, *, alpha: float) -> torch.Tensor:
        print(f"the kernel of ScaledAdd runs, alpha is {alpha}")
        return torch.add(x, y, alpha=alpha)

    def shapes(x: torch.Tensor, y: torch.Tensor, *, alpha: float) -> torch.Tensor:
        return torch.empty_like(x)

    ge.register_kernel("ScaledAdd", shapes, kernel)


# ---- an operator that updates in place: what is updated is marked (a!) and not returned

library.define("write_rows(Tensor(a!) cache, Tensor index, Tensor rows) -> ()")


@torch.library.impl(library, "write_rows", "CompositeExplicitAutograd")
def write_rows(cache: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    cache.index_copy_(0, index, rows)


@torch.library.register_fake("example::write_rows", lib=library)
def write_rows_fake(cache: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    return None


def cache_model(cache: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    torch.ops.example.write_rows(cache, index, rows * 2)
    return cache.sum()


addresses: list[int] = []


def give_write_rows_all() -> None:
    ge.register_operator("WriteRows", inputs=["cache", "index", "rows"], outputs=["cache"])

    @torchair.register_fx_node_ge_converter(torch.ops.example.write_rows.default)
    def convert(cache: ge.Tensor, index: ge.Tensor, rows: ge.Tensor) -> None:
        ge.custom_op("WriteRows", cache, index, rows)

    def kernel(cache: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
        if cache.device.type != "meta":
            addresses.append(cache.data_ptr())
        cache[index] = rows

    ge.register_kernel("WriteRows", None, kernel, updates=["cache"])


def main() -> None:
    x, y = torch.randn(4), torch.randn(4)
    show("1 torch's definition is enough", add_model, x, y)
    declare_scaled_add()
    show("2 a GE operator of that name: the converter is generated", add_model, x, y)
    convert_scaled_add()
    give_scaled_add_a_kernel()
    show("3 a converter and a kernel", add_model, x, y)

    cache, index, rows = torch.zeros(8, 3), torch.tensor([1, 5]), torch.randn(2, 3)
    show("4 an update in place", cache_model, cache, index, rows)
    give_write_rows_all()
    show("5 an update in place, with converter and kernel", cache_model, cache, index, rows)
    print("the kernel got the caller's cache:", addresses == [cache.data_ptr()])


if __name__ == "__main__":
    main()
