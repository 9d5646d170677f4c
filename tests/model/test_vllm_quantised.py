"""Quantised checkpoints under vLLM: tokens of the numbers that their integers stand for, layers
against float64 and against vLLM's own operators. Only where vLLM is installed (`make vllm`)."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("vllm")

from vllm.model_executor.kernels.linear import (
    CPUInt8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
    MPLinearLayerConfig,
)
from vllm.scalar_type import scalar_types

import torchair
from generic_nodes import collect_generic_nodes
from torchair.engine.units import native_units
from torchair.vllm_plugin import quantised
from vllm_checkpoints import FORMATS, GROUP, generate, packed, save_tiny, write
from vllm_checkpoints import quantised as rounded

ROWS = (5, 1, 19)
INT8 = "int8 x int8"


def test_kernels_are_offered_when_vllm_has_loaded_its_own():
    program = (
        "import sys\n"
        "from torchair import vllm_plugin\n"
        "vllm_plugin.register()\n"
        "assert 'torchair.vllm_plugin.quantised' not in sys.modules\n"
        "from vllm.model_executor.kernels import linear\n"
        "from vllm.platforms import PlatformEnum\n"
        "tables = linear._POSSIBLE_KERNELS, linear._POSSIBLE_INT8_KERNELS\n"
        "print(*(t[PlatformEnum.CPU][0].__name__ for t in tables))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert done.stdout.split()[-2:] == ["TorchairWeightKernel", "TorchairInt8Kernel"]


# ---- whole models ----


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="module")
def numbers():
    """Tokens of dequantised checkpoints without compilation, by how they were quantised."""
    return {}


@pytest.mark.parametrize("name", [name for name in FORMATS if name != INT8])
def test_tokens_of_the_numbers_that_integers_stand_for(llama, numbers, tmp_path, name):
    form, cache = FORMATS[name], tmp_path / "cache"
    integers, dense = write(llama, tmp_path, form)
    found = generate(integers, cache)
    key = form.bits, form.symmetric
    if key not in numbers:
        numbers[key] = generate(dense, cache, enforce_eager=True)["tokens"]
    assert found["quantised"] == ["TorchairWeightKernel"] and found["graphs"] == 2
    assert found["tokens"] == numbers[key]


def test_bytes_give_the_tokens_of_vllm_itself_cold_and_warm(llama, tmp_path):
    integers, _ = write(llama, tmp_path, FORMATS[INT8])
    eager = generate(integers, tmp_path / "eager", enforce_eager=True)
    assert eager["quantised"] == ["CPUInt8ScaledMMLinearKernel"]
    for loaded in (0, 1):
        found = generate(integers, tmp_path / "cache")
        assert found["quantised"] == ["TorchairInt8Kernel"] and found["loaded"] == loaded
        assert found["tokens"] == eager["tokens"]


# ---- layers ----


@pytest.fixture
def ours(monkeypatch):
    """There is no model whose compiler could be asked for."""
    monkeypatch.setattr(quantised, "_compiled_by_us", lambda: (True, None))


@pytest.fixture
def heads(monkeypatch):
    """Operators of the products that run as native code."""
    found, original = [], native_units.fuse

    def fuse(*args):
        made = original(*args)
        found.extend(unit.anchor.type for unit in made.units if unit.kind == "matmul")
        return made

    monkeypatch.setattr(native_units, "fuse", fuse)
    return found


class Layer(nn.Module):
    """What vLLM gives a kernel: parameters that know which of their dims is which."""

    def __init__(self, kernel, **parts):
        super().__init__()
        self.kernel, self.logical_widths = kernel, [48, 48]
        for name, (value, notes) in parts.items():
            made = None if value is None else nn.Parameter(value, requires_grad=False)
            for note, number in notes.items():
                setattr(made, note, number)
            self.register_parameter(name, made)
        kernel.process_weights_after_loading(self)

    def forward(self, x, bias):
        return F.silu(self.kernel.apply_weights(self, x, bias))


def compiled(layer):
    config = torchair.CompilerConfig()
    config.experimental_config.frozen_parameter = True
    backend = torchair.get_npu_backend(compiler_config=config)
    return torch.compile(layer, backend=backend, dynamic=True, fullgraph=True)


CASES = {
    "four bits": (scalar_types.uint4b8, GROUP),
    "four bits, zero points": (scalar_types.uint4, GROUP),
    "four bits, a scale for each row": (scalar_types.uint4b8, -1),
    "eight bits": (scalar_types.uint8b128, GROUP),
    "eight bits, zero points": (scalar_types.uint8, GROUP),
}


@pytest.mark.filterwarnings("ignore:frozen_parameter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["GPTQ", "compressed"])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_weights_of_few_bits_against_float64(fresh_dynamo, ours, heads, case, layout, dtype):
    kind, group = CASES[case]
    n, k, zero_points = 96, 128, not kind.has_bias()
    made = rounded(torch.randn(n, k), kind.size_bits, k if group == -1 else group, not zero_points)
    made.scales = made.scales.to(dtype).float()
    turned = layout == "GPTQ"  # [k, n]; else [n, k]
    axis, integers = int(not turned), made.integers.t() if turned else made.integers
    dims = {"input_dim": axis, "output_dim": 1 - axis}
    scales, zeros = (x.t().contiguous() if turned else x for x in (made.scales, made.zeros))
    parts = {
        "q": (packed(integers, kind.size_bits, axis), dims | {"packed_dim": axis}),
        "s": (scales.to(dtype), dims),
        "z": (packed(zeros, kind.size_bits, 1 - axis), dims | {"packed_dim": 1 - axis}),
    }
    config = MPLinearLayerConfig((k, n), (k, n), kind, dtype, group, zero_points)
    assert quantised.TorchairWeightKernel.can_implement(config)[0]
    layer = Layer(quantised.TorchairWeightKernel(config, "q", "s", "z"), **parts)
    bias, right = torch.randn(n).to(dtype), made.numbers.double()
    fast, near = compiled(layer), torch.finfo(dtype).eps
    with collect_generic_nodes() as generic:
        for rows in ROWS:
            x = torch.randn(rows, k).to(dtype)
            truth = F.silu(F.linear(x.double(), right, bias.double()))
            wrong = 1.5 * float((layer(x, bias).double() - truth).abs().max())  # of eager
            torch.testing.assert_close(fast(x, bias).double(), truth, rtol=near, atol=wrong)
    assert not generic and set(heads) == {"WeightQuantBatchMatmulV2"}


def bytes_layer(kernel, static, symmetric, channels, dtype=torch.float32):
    """A layer of two that were joined."""
    n, k = 96, 128
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    scale = torch.rand(n, 1) / 512 if channels else torch.rand(2) / 512
    parts = {"weight": (weight, {}), "scale": (scale, {}), "adjusted": (None, {})}
    parts["at"] = (torch.tensor([0.02, 0.03]) if static else None, {})
    shifted = static and not symmetric
    parts["zero"] = (torch.tensor([-7, 11], dtype=torch.int8) if shifted else None, {})
    parts["bias"] = (None, {})
    config = Int8ScaledMMLinearLayerConfig(static, channels, symmetric)
    names = ["weight", "scale", "at", "zero", "adjusted"]
    return Layer(kernel(config, names), **parts)


WAYS = [(static, symmetric) for static in (False, True) for symmetric in (False, True)]


def rows_in_float64(layer, x, bias, symmetric):
    """The product of the numbers that rounded rows and integers stand for."""
    at, zero = layer.at, layer.zero
    if at is None:
        at, zero = quantised._range_of(x.float(), symmetric)
    shift = 0 if zero is None else zero
    integers = ((x.float() / at).round() + shift).clamp(-128, 127)
    numbers = (integers - shift).double() * at.double()
    weight = layer.weight.double() * layer.scale.double()[:, None]
    return F.silu(F.linear(numbers, weight, bias.double()))


@pytest.mark.filterwarnings("ignore:frozen_parameter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("channels", [True, False])
@pytest.mark.parametrize(("static", "symmetric"), WAYS)
@torch.no_grad()
def test_bytes_against_float64(fresh_dynamo, ours, heads, static, symmetric, channels, dtype):
    layer = bytes_layer(quantised.TorchairInt8Kernel, static, symmetric, channels)
    fast, near = compiled(layer), 0.01 if dtype == torch.bfloat16 else 1e-5
    bias = torch.randn(96).to(dtype)
    with collect_generic_nodes() as generic:
        for rows in ROWS:
            x = torch.randn(rows, 128).to(dtype)
            x[0] = 0  # a row without a scale
            truth = rows_in_float64(layer, x, bias, symmetric)
            torch.testing.assert_close(fast(x, bias).double(), truth, rtol=near, atol=near)
    assert not generic and set(heads) == {"QuantBatchMatmulV3"}


@pytest.mark.parametrize(("static", "symmetric"), WAYS)
@torch.no_grad()
def test_bytes_are_what_vllm_computes(ours, static, symmetric):
    kernels = (quantised.TorchairInt8Kernel, CPUInt8ScaledMMLinearKernel)
    results = []
    for kernel in kernels:
        torch.manual_seed(0)
        layer = bytes_layer(kernel, static, symmetric, channels=True)
        results.append(layer(torch.randn(9, 128), torch.randn(96)))
    step = 0.03 * 128 * results[0].new_tensor(1 / 512)  # of one number of a row
    torch.testing.assert_close(*results, rtol=1e-4, atol=float(step))


def test_layers_that_are_not_ours():
    serves = quantised.TorchairWeightKernel.can_implement
    kind = scalar_types.uint4b8
    config = SimpleNamespace(weight_type=kind, act_type=torch.float32, group_size=32)
    assert serves(config) == (False, "torchair does not compile the model")
    for name, value in (("act_type", torch.int8), ("group_size", 12)):
        other = SimpleNamespace(**{**vars(config), name: value})
        assert not serves(other)[0] and "compile" not in serves(other)[1]
