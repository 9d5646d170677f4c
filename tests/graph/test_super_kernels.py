"""`scope.super_kernel`: one segment of native code, or an error that names the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.library import custom_op

import torchair
from torchair import scope
from torchair.errors import ScopeError

STRICT = "feed-sync-all=1:strict-scope-check=abort"


@custom_op("test_super_kernels::foreign", mutates_args=())
def foreign(x: torch.Tensor) -> torch.Tensor:
    """An operator without a converter."""
    return x + 1


@foreign.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def compiled(function: Callable[..., Any], dynamic: bool = False, **options: Any) -> Any:
    torch._dynamo.reset()
    config = torchair.CompilerConfig()
    config.mode = options.get("mode", "max-autotune")
    backend = torchair.get_npu_backend(compiler_config=config)
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A product and a norm; with a foreign operator before and after it is three segments."""
    with scope.super_kernel("layer", STRICT):
        h = torch.nn.functional.layer_norm(x @ w, (8,)).softmax(-1)
    return foreign(h)


def broken(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with scope.super_kernel("layer", STRICT):
        return foreign(x @ w).softmax(-1)


def split(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The foreign operator is not in the scope, but in the middle of it."""
    with scope.super_kernel("layer", STRICT):
        h = x @ w
        with scope.super_kernel(None):
            h = foreign(h)
        return h.softmax(-1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_a_scope_of_native_kernels_is_one_segment(mode: str, dynamic: bool) -> None:
    call = compiled(layer, dynamic, mode=mode)
    w = torch.randn(16, 8)
    with torch.no_grad():
        for rows in (4, 4, 6):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(call(x, w), layer(x, w))


@pytest.mark.parametrize("function", [broken, split])
def test_a_foreign_operator_breaks_a_strict_scope(function: Callable[..., Any]) -> None:
    x, w = torch.randn(4, 16), torch.randn(16, 8)
    with torch.no_grad(), pytest.raises(ScopeError, match="not one kernel") as raised:
        compiled(function)(x, w)
    text = str(raised.value)
    assert "foreign has no native kernel here" in text and "layer" in text
    assert "test_super_kernels.py" in text


@pytest.mark.parametrize("options", ["", "strict-scope-check=bypass", "stream-fusion=1"])
def test_other_scopes_run_in_pieces(options: str) -> None:
    def pieces(x: torch.Tensor) -> torch.Tensor:
        with scope.super_kernel("k", options):
            return foreign(x * 2) * 3

    x = torch.randn(5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(pieces)(x), pieces(x))


def test_another_stream_breaks_a_strict_scope() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with scope.super_kernel("k", STRICT):
            a = x.softmax(0)
            with scope.npu_stream_switch("other"):
                b = (x * 2).softmax(0)
        return a, b

    with torch.no_grad(), pytest.raises(ScopeError, match="runs on another stream"):
        compiled(model)(torch.randn(5))


def test_wrong_options_are_told() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        with scope.super_kernel("k", "strict-scope-check=stop"):
            return foreign(x) * 2

    with torch.no_grad(), pytest.raises(ScopeError, match="bypass or abort is expected"):
        compiled(model)(torch.randn(5))
