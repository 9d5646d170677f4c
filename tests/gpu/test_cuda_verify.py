"""`torchair.verify`, `torchair.explain` and the report on a GPU. Run with `make test-cuda`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import torchair
from models import BERT, LLAMA, Bert, Llama, bert_inputs, build, llama_inputs
from torchair.codegen.cuda.target import CudaTarget, cuda
from torchair.codegen.loops import Nest, const, op
from torchair.codegen.requests import Joint, Product
from torchair.codegen.target import DEFAULT_CONFIG, Generated, KernelConfig
from torchair.verification.report import Author

pytestmark = pytest.mark.cuda
MODES = ("max-autotune", "reduce-overhead")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield


def decoder(dtype: torch.dtype = torch.bfloat16) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """One token through two layers."""
    config = replace(LLAMA["4 layers"], layers=2)
    model = build(Llama, config).to("cuda", dtype)
    return model, tuple(x.cuda() for x in llama_inputs(config, 1, start=8))


def encoder() -> tuple[Any, tuple[torch.Tensor, ...]]:
    config = BERT["tiny"]
    return build(Bert, config).cuda(), tuple(x.cuda() for x in bert_inputs(config, 2, 16))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [decoder, encoder])
def test_what_is_right_is_said_to_be(make: Callable[[], Any], mode: str, tmp_path: Path) -> None:
    model, inputs = make()
    with warnings.catch_warnings(action="ignore"):
        found = torchair.verify(model, *inputs, mode=mode, folder=tmp_path)
        assert found, str(found)
        assert [g.calls for g in found.graphs] == [3]
        every = torchair.verify(model, *inputs, mode=mode, folder=tmp_path, every_node=True)
    assert every and not list(tmp_path.iterdir()), str(every)


def scaled(nest: Nest) -> Nest:
    """Everything that it stores is one percent too large."""
    stores = (replace(s, value=op("mul", s.value, const(1.01, s.value.dtype))) for s in nest.stores)
    return replace(nest, stores=tuple(stores))


@pytest.fixture
def wrong_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products of few rows are too large."""
    generate = CudaTarget.generate

    def planted(
        self: CudaTarget, request: Any, label: str, config: KernelConfig = DEFAULT_CONFIG
    ) -> Generated:
        if isinstance(request, Joint):
            inner = request.product
            request = replace(request, product=replace(inner, epilogue=scaled(inner.epilogue)))
        elif isinstance(request, Product):
            request = replace(request, epilogue=scaled(request.epilogue))
        return generate(self, request, label, config)

    known = cuda(0)._joints, cuda(0)._orders
    cuda(0)._joints, cuda(0)._orders = {}, {}
    monkeypatch.setattr(CudaTarget, "generate", planted)
    yield
    cuda(0)._joints, cuda(0)._orders = known


@pytest.mark.parametrize("mode", MODES)
def test_a_wrong_kernel_is_found_and_blamed(
    mode: str, wrong_products: None, tmp_path: Path
) -> None:
    model, inputs = decoder(torch.float32)
    with warnings.catch_warnings(action="ignore"):
        found = torchair.verify(model, *inputs, mode=mode, folder=tmp_path)
    assert not found and len(found.findings) == 1
    finding = found.findings[0]
    assert finding.stage is Author.KERNEL and "MatMul" in finding.culprit, str(finding)
    assert finding.script is not None and finding.script.exists()


def test_where_the_time_of_a_call_goes() -> None:
    model, inputs = decoder()
    found = torchair.explain(model)(*inputs)
    (graph,) = found.graphs
    assert found.rates is not None and found.times is not None
    assert found.rates.bytes > 100e9 and found.rates.operations > 1e12
    units = [u for u in graph.units if u.kind == "native"]
    assert len(units) > 10 and all(u.seconds > 0 and u.moved > 0 for u in units)
    assert all(u.share(found.rates) > 0 for u in units if u.moved > 1 << 20)
    linear = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    weights = sum(w.numel() * w.element_size() for w in linear)
    assert weights < sum(u.moved for u in units) < 1.5 * weights
    assert 0 < found.times.kernels <= found.times.graphs <= found.times.call
    assert "of the machine" in str(found)


@pytest.mark.parametrize("mode", MODES)
def test_a_page_about_the_graph(mode: str, tmp_path: Path) -> None:
    model, inputs = decoder()
    config, path = torchair.CompilerConfig(), tmp_path / "report.html"
    config.debug.report.path = str(path)
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        config.mode = mode
        expected = model(*inputs)
        fast = torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config))
        torch.testing.assert_close(fast(*inputs), expected, atol=0.1, rtol=0.1)
    text = path.read_text()
    data = text[text.index('{"title"') : text.rindex("</script>")]
    (graph,) = json.JSONDecoder().raw_decode(data)[0]["graphs"]
    assert graph["note"] == "" and graph["device"].startswith("cuda")
    assert any(".visible .entry" in k["machine"] for k in graph["kernels"])
    slices = graph["timeline"]["slices"]
    assert len(slices) >= len(graph["kernels"]) and all(end >= begin for *_, begin, end in slices)
    assert all(row.get("us", 1) > 0 for row in graph["steps"] if row["kind"] == "native")
