"""How a graph becomes GPU kernels, each stage as text. Needs no GPU.

Run it: `python examples/gpu_kernel.py`. What it prints is explained in docs/gpu_engine.md.
"""

from __future__ import annotations

from torchair import ge
from torchair.codegen.cuda.jit import describe, module_text
from torchair.codegen.cuda.run import entry_of
from torchair.codegen.requests import Loops
from torchair.engine.inspect.dry_run import DryRun, dry_run
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Graph
from torchair.operators import infer

DIM, FFN = 1024, 4096
HOPPER = describe((9, 0), 132)


def feed_forward() -> Graph:
    """What a decoder layer does to one token after attention: norm, gated products, residual."""
    with Graph("feed_forward", infer) as graph:
        half = DataType.DT_BF16
        x, scale = (_data(i, half, d) for i, d in enumerate(([1, DIM], [DIM])))
        gate, up = (_data(i, half, [FFN, DIM]) for i in (2, 3))
        down = _data(4, half, [DIM, FFN])
        h, _ = ge.RmsNorm(x, scale, epsilon=1e-5)
        left = ge.Swish(ge.MatMul(h, gate, transpose_x2=True), scale=1.0)
        both = ge.Mul(left, ge.MatMul(h, up, transpose_x2=True))
        ge.NetOutput([ge.Add(x, ge.MatMul(both, down, transpose_x2=True))])
    return graph


def _data(index: int, dtype: DataType, dims: list[int]) -> ge.Tensor:
    return ge.Data(index=index, dtype=dtype, shape=dims, placement="NPU")


def show(title: str, text: str) -> None:
    """A part of the output with its name."""
    print(f"== {title}\n{text}\n")


def main() -> None:
    """Print every stage."""
    made: DryRun = dry_run(feed_forward(), HOPPER)
    steps = [s for s in made.plan.steps if s.native is not None]
    show("steps", "\n".join("+".join(n.type for n in s.also) for s in steps))
    show("launches, kernels and how many steps each computes", str(made))
    norm = next(s.code.order.request for s in steps if s.also[0].type == "RmsNorm")
    assert isinstance(norm, Loops)
    show("the nest of the normalisation", str(norm.nest))
    entry = entry_of(made.launches[-1], made.gpu)
    text = module_text([entry])
    show(
        "LLVM text of the last launch, the first lines of its kernel",
        "\n".join(text[text.index("define internal") :].splitlines()[:8]),
    )
    ptx = made.ptx(made.launches[-1])
    wanted = ("ld.global.nc", "shfl.sync", "fma.rn", "st.global", "bar.sync")
    counted = {w: sum(w in line for line in ptx.splitlines()) for w in wanted}
    rows = "\n".join(f"{name:13} {count}" for name, count in counted.items())
    show("PTX of the last launch: instructions", rows)
    assert ".local" not in ptx, "registers do not suffice"
    print("kernels for", made.gpu.name)


if __name__ == "__main__":
    main()
