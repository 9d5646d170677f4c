"""Nothing silent: a fallback as an error, and weights that nobody counts writes to.

python examples/reliability.py
"""

from __future__ import annotations

import warnings

import torch
from torch import nn

import torchair
from torchair.convert import registry

x = torch.ones(2, 64)


def fallbacks() -> None:
    """A converter with a fault: a fallback that is told, or an error."""
    entry = registry.find(torch.ops.aten.sin.default)
    assert entry is not None

    def broken(*args: object, **named: object) -> None:
        raise ValueError("this converter has a fault")

    registry._builtin[torch.ops.aten.sin.default] = type(entry)(**{**vars(entry), "fn": broken})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        told = torchair.explain(torch.sin)(x)
    print("the warning:", str(said[0].message).partition(". ")[0])
    print("explained:  ", next(line for line in str(told).splitlines() if "fallback" in line))
    config = torchair.CompilerConfig()
    config.debug.strict = True
    torch._dynamo.reset()
    try:
        torch.compile(torch.sin, backend=torchair.get_npu_backend(compiler_config=config))(x)
    except Exception as error:
        print("strict:     ", str(error).splitlines()[1])
    registry._builtin[torch.ops.aten.sin.default] = entry


@torch.no_grad()
def weights() -> None:
    """A write that torch does not count, and the function that tells of it."""
    config = torchair.CompilerConfig()
    config.experimental_config.frozen_parameter = True
    model = nn.Linear(64, 64).eval()
    with warnings.catch_warnings(action="ignore"):  # a reminder of what frozen means
        backend = torchair.get_npu_backend(compiler_config=config)
    fast = torch.compile(model, backend=backend)
    fast(x)
    model.weight.detach().numpy()[5, 7] = 3.0  # torch does not count this write
    torchair.weights_changed(model)  # so that the next call packs the weights again
    torch.testing.assert_close(fast(x), model(x))
    print("equal to eager")


fallbacks()
weights()
