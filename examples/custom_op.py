"""A torch operator of your own in a GE graph: four ways, from no work to full control.

Run it: `python examples/custom_op.py`. docs/writing_converters.md explains each way.
"""

from __future__ import annotations

import io
import os
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

import torchair
from torchair import ge
from torchair.codegen.loops import Expr
from torchair.convert.registry import Decline, unregister
from torchair.operators.core import FLOATS, Lowering, Op, Trait, add_row, same_as
from torchair.operators.formulas import Formula, add, clamp, mul, sub, with_attributes
from torchair.operators.loops import LowerOp

# ---- the operator, as any torch extension would define it


@torch.library.custom_op("example::leaky_clip", mutates_args=())
def leaky_clip(x: torch.Tensor, bound: float, slope: float) -> torch.Tensor:
    """Identity between -bound and bound, a line of the given slope outside."""
    inside = x.clamp(-bound, bound)
    return inside + slope * (x - inside)


@leaky_clip.register_fake
def _(x: torch.Tensor, bound: float, slope: float) -> torch.Tensor:
    return torch.empty_like(x)


LEAKY_CLIP = torch.ops.example.leaky_clip.default


# ---- a converter: the operator in terms of GE operators that exist


def as_known_operators(
    x: ge.Tensor, bound: float, slope: float, *, meta_outputs: ge.TensorSpec
) -> ge.Tensor:
    """leaky_clip(Tensor x, float bound, float slope) -> Tensor"""
    if meta_outputs.dtype != ge.DataType.DT_FLOAT:
        raise Decline("only written for float32")
    inside = ge.Maximum(ge.Minimum(x, bound), -bound)
    return ge.Add(inside, ge.Mul(ge.Sub(x, inside), slope))


# ---- an operator of one's own: a converter, and the row that gives it a meaning


def as_own_operator(x: ge.Tensor, bound: float, slope: float) -> ge.Tensor:
    """leaky_clip(Tensor x, float bound, float slope) -> Tensor"""
    attrs = {"bound": ge.attr.Float(bound), "slope": ge.attr.Float(slope)}
    return ge.custom_op("LeakyClip", inputs={"x": x}, outputs=["y"], attrs=attrs)


def leaky_clip_kernel(op: Op) -> Any:
    bound, slope = op.attr("bound"), op.attr("slope")

    def run(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        inside = x.clamp(-bound, bound)
        return torch.add(inside, x - inside, alpha=slope, out=out)

    return run


def leaky_clip_formula(op: LowerOp) -> Formula:
    bound, slope = op.attr("bound"), op.attr("slope")

    def element(x: Expr) -> Expr:
        inside = clamp(x, -bound, bound)
        return add(inside, mul(sub(x, inside), slope))

    return element


add_row(
    "LeakyClip",
    same_as("x"),
    leaky_clip_kernel,
    Trait.ELEMENTWISE,
    out=True,
    loops=Lowering(with_attributes(leaky_clip_formula)),
    types=FLOATS,
)


# ---- what each way leads to


def nodes(dtype: torch.dtype = torch.float32, *, strict: bool = False) -> list[str]:
    """Compile a function around the operator, compare it with eager, give the lines of its dump."""
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as folder:
        config = torchair.CompilerConfig()
        config.debug.graph_dump.type = "py"
        config.debug.graph_dump.path = folder
        config.experimental_config.strict_converters = strict

        def model(x: torch.Tensor) -> torch.Tensor:
            return leaky_clip(x * 2, 1.0, 0.125)

        call = torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config))
        x = torch.linspace(-2, 2, 6, dtype=dtype)
        torch.testing.assert_close(call(x), model(x))
        (file,) = Path(folder).glob("dynamo_original_*.py")
        return [line for line in file.read_text().splitlines() if " = ge." in line]


def units() -> list[str]:
    """What becomes one kernel of the function, as TORCHAIR_DEBUG=3 tells it."""
    os.environ["TORCHAIR_DEBUG"] = "3"
    with redirect_stdout(io.StringIO()) as said:
        nodes()
    del os.environ["TORCHAIR_DEBUG"]
    return [x for x in said.getvalue().splitlines() if x.startswith(("loops", "torch  "))]


def show(title: str, lines: list[str]) -> None:
    print(f"\n== {title}\n")
    print("\n".join(lines))


def main() -> None:
    show("1 no converter: the generic node", nodes())

    torchair.register_fx_node_ge_converter(LEAKY_CLIP)(as_known_operators)
    show("2 a converter to operators that exist", nodes())
    show("3 the same converter declines float64", nodes(torch.float64))

    torchair.register_fx_node_ge_converter(LEAKY_CLIP)(as_own_operator)
    show("4 an operator of one's own", [*nodes(), *units()])

    unregister(LEAKY_CLIP)
    try:
        nodes(strict=True)
    except Exception as error:
        lines = str(error).splitlines()
        said = [line for line in lines if line.startswith(("ConversionError", "  schema"))]
        show("5 strict converters: no generic node", said)


if __name__ == "__main__":
    main()
