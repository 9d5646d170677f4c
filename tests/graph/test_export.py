"""`dynamo_export`: what the files hold, by a reader of its own, and that they run elsewhere."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import air_reader
import torchair
from models import (
    BERT,
    LLAMA,
    MLP,
    RESNET,
    Bert,
    Llama,
    Mlp,
    ResNet,
    bert_inputs,
    build,
    llama_inputs,
    mlp_inputs,
    resnet_inputs,
)
from processes import run_ranks
from tolerance import assert_close_to_reference
from torchair.deploy import export as exporting
from torchair.deploy.package import CALL
from torchair.errors import GraphError, SerializationError, UnsupportedModeError
from torchair.ge import attrs as attr
from torchair.inference import set_dim_gears
from torchair.serde import air

ALONE = {**os.environ, "PYTHONPATH": str(Path(torchair.__file__).parents[1])}

CHILD = """
import sys
import numpy, torch, torchair

try:
    import models
    sys.exit("the source of the models is here")
except ImportError:
    pass
for name in sys.argv[1:]:
    model = torchair.load(f"{name}.air")
    inputs = numpy.load(f"{name}.npz", allow_pickle=False)
    for k in range(2):
        result = model(*(torch.from_numpy(inputs[i]) for i in inputs.files))
        numpy.save(f"{name}_{k}.npy", result.numpy())
assert "torch._dynamo" not in sys.modules and "torchair.convert" not in sys.modules
"""

MODELS: dict[str, tuple[Any, Any, Any]] = {
    "mlp": (Mlp, MLP["tiny"], mlp_inputs),
    "resnet": (ResNet, RESNET["tiny"], resnet_inputs),
    "bert": (Bert, BERT["tiny"], lambda c: bert_inputs(c, 2, 12)),
    "llama": (Llama, LLAMA["tiny"], lambda c: llama_inputs(c, 1, 4)),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All models as files, and what a process without their source computes with them."""
    folder = tmp_path_factory.mktemp("exported")
    for name, (kind, config, make) in MODELS.items():
        model, inputs = build(kind, config).eval(), make(config)
        before = copy.deepcopy(model.state_dict())
        torchair.dynamo_export(*inputs, model=model, export_path=str(folder), export_name=name)
        changed = [k for k, v in model.state_dict().items() if not torch.equal(v, before[k])]
        assert not changed, "an export does not run the model"
        np.savez(folder / f"{name}.npz", *(t.numpy() for t in inputs))
    run = [sys.executable, "-W", "ignore", "-c", CHILD, *MODELS]
    done = subprocess.run(run, capture_output=True, text=True, cwd=folder, env=ALONE, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_models_run_without_their_source(exported: Path, name: str) -> None:
    kind, config, make = MODELS[name]
    model = build(kind, config).eval()
    for k in range(2):  # a second time with the cache that the first call has filled
        before, inputs = copy.deepcopy(model), make(config)
        expected = model(*inputs)
        got = torch.from_numpy(np.load(exported / f"{name}_{k}.npy"))
        assert_close_to_reference(before, inputs, got, expected)


@pytest.mark.parametrize("name", MODELS)
def test_files_are_what_the_format_says(exported: Path, name: str) -> None:
    kind, config, make = MODELS[name]
    model, inputs = build(kind, config), make(config)
    graph = air_reader.read(exported / f"{name}.air")
    named = dict([*model.named_parameters(), *model.named_buffers()])
    constants = {op.attr["_weight_name"].s.decode(): op for op in air_reader.ops(graph, "Const")}
    for weight, op in constants.items():
        if weight:
            payload, tensor = op.attr["value"].t, named[weight].detach()
            assert op.name == weight.replace(".", "_") and "_readable_value" not in op.attr
            assert list(payload.desc.shape.dim) == list(tensor.shape)
            assert payload.data == tensor.numpy().tobytes()
    states = air_reader.ops(graph, "RefData")
    used = {*constants, *(op.attr["_weight_name"].s.decode() for op in states)} - {""}
    assert used and len(air_reader.ops(graph, "Data")) + len(states) == len(graph.input)
    data = [*air_reader.ops(graph, "Data"), *states]
    assert sorted(op.attr["index"].i for op in data) == list(range(len(data)))
    assert len(air_reader.ops(graph, "Data")) == len(inputs)
    (output,) = air_reader.ops(graph, "NetOutput")
    assert list(graph.output) == [e for e in output.input if not e.endswith(":-1")]
    names = {op.name for op in graph.op}
    assert all(e.rpartition(":")[0] in names for op in graph.op for e in op.input if e)
    assert all(d.layout for op in graph.op for d in op.output_desc)
    for op in states:
        assert op.attr["_origin_data_name"].s and op.name.startswith("RefData_")
        (assign,) = [a for a in air_reader.ops(graph, "Assign") if a.input[0] == f"{op.name}:0"]
        assert f"{assign.name}:-1" in output.input
    assert bool(states) == (name == "llama")


def test_the_readable_file_is_beside_it(exported: Path) -> None:
    text = (exported / "dynamo.pbtxt").read_text()
    assert text.startswith("node {") and 'op: "NetOutput"' in text
    assert len(text) < 2_000_000, "payloads are left out"


class Scaled(nn.Module):
    """Two types, a constant, and a node of torch that is two of GE."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(10, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + y + torch.ones([2, 4], dtype=torch.float16), self.scale * 2


def test_the_readable_file_describes_values_once(tmp_path: Path) -> None:
    """The counts are those of the original's files."""
    x = torch.randn(2, 4, dtype=torch.bfloat16)
    torchair.dynamo_export(x, x + 1, model=Scaled(), export_path=str(tmp_path))
    text = (tmp_path / "dynamo.pbtxt").read_text()
    assert text.count("dtype: DT_BF16") == 13 and text.count("  dim: 10") == 4
    graph = air_reader.read(tmp_path / "export.air")  # the model itself keeps all
    (scaled,) = air_reader.ops(graph, "Muls")
    assert list(scaled.output_desc[0].shape.dim) == [10]
    torchair.dynamo_export(
        torch.randn(3),
        model=nn.Sequential(nn.ReLU(), nn.Tanh()),
        export_path=str(tmp_path),
        dynamic=True,
    )
    assert (tmp_path / "dynamo.pbtxt").read_text().count(" dim: -1") == 4


class Parts(nn.Module):
    """Arguments of all kinds: nested, by keyword, updated, unused, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 64), nn.Linear(64, 6)])
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any, unused: Any, *, more: Any, scale: Any = None) -> Any:
        self.calls.add_(1)
        more[0]["k"].mul_(2)
        y = self.layers[1](torch.relu(self.layers[0](more[1])))
        return y.sum(0) * x + more[0]["k"] * self.calls, x.t()


def parts(rows: int) -> tuple[Any, Any]:
    more = [{"k": torch.randn(6)}, torch.randn(rows, 4)]
    return (torch.randn(rows + 5, 6), torch.randn(2)), {"more": more}


@pytest.mark.parametrize("beside", [False, True], ids=["inside", "beside"])
@torch.no_grad()
def test_arguments_updates_and_sizes(
    beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    torch.manual_seed(0)
    model = Parts()
    if beside:
        monkeypatch.setattr(exporting, "MOST_INSIDE", 1000)
    args, kwargs = parts(3)
    torchair.dynamo_export(
        *args, model=model, export_path=str(tmp_path / "deep" / "er"), dynamic=True, **kwargs
    )
    file = tmp_path / "deep" / "er" / "export.air"
    graph = air_reader.read(file)
    weights = sorted(n.replace(".", "_") for n, _ in model.named_parameters())
    assert beside == ("saving weights: 4/4" in capsys.readouterr().out)
    if beside:
        found = air_reader.ops(graph, "FileConstant")
        assert sorted(op.name for op in found) == weights
        for op in found:
            path = Path(op.attr["file_path"].s.decode())
            tensor = next(p for n, p in model.named_parameters() if n.replace(".", "_") == op.name)
            assert path == file.parent / op.name and path.read_bytes() == tensor.numpy().tobytes()
            assert list(op.attr["shape"].list.i) == list(tensor.shape) and op.attr["dtype"].dt == 0
    else:
        assert not air_reader.ops(graph, "FileConstant")
    loaded = torchair.load(file)
    assert [p.name for p in loaded.inputs] == ["x", "more.0.k", "more.1"]
    assert loaded.inputs[0].shape == (-1, 6) and loaded.parameters == ["x", "more"]
    for rows in (3, 5, 5):
        (x, _), kwargs = parts(rows)
        theirs = copy.deepcopy(kwargs)
        result, view = loaded(x, **kwargs)
        torch.testing.assert_close(result, model(x, None, **theirs)[0])
        torch.testing.assert_close(kwargs, theirs)
        assert view.shape == (6, rows + 5) and view.data_ptr() == x.data_ptr()


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_a_cache_of_transformers(tmp_path: Path) -> None:
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model, cache = LlamaForCausalLM(config).eval(), DynamicCache(config=config)
    model(torch.randint(0, 32, (1, 5)), past_key_values=cache)
    kept, token = copy.deepcopy(cache), torch.tensor([[3]])
    torchair.dynamo_export(
        input_ids=token, past_key_values=cache, model=model, export_path=str(tmp_path)
    )
    assert cache.get_seq_length() == 5, "the model was not run"
    parts = {
        f"past_key_values.layers.{k}.{part}": getattr(layer, part)
        for k, layer in enumerate(kept.layers)
        for part in ("keys", "values")
    }
    loaded = torchair.load(tmp_path / "export.air")
    assert loaded.parameters == ["input_ids", *parts]
    results = loaded(input_ids=token, **parts)
    expected = model(input_ids=token, past_key_values=kept)
    torch.testing.assert_close(results.logits, expected.logits)
    assert results["logits"] is results.logits is results[0] and len(results) == 2
    for mine, theirs in zip(results.past_key_values.layers, kept.layers, strict=True):
        torch.testing.assert_close((mine["keys"], mine["values"]), (theirs.keys, theirs.values))


@dataclass
class Found:
    first: torch.Tensor
    rest: list[Any]


class Nested(nn.Module):
    """Results of all kinds: twice the same, an argument, a state, numbers, fields."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.log: list[Any] = []

    def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor]) -> Any:
        self.calls.add_(1)
        y = x * self.calls + more["a"]
        self.log.append(y)
        ends = torch.aminmax(y)
        return {"found": Found(y, [y, None, 3]), "given": (more["a"], x.t()), "n": self.calls}, ends


@torch.no_grad()
def test_results_are_nested_as_the_models(tmp_path: Path) -> None:
    model, given = Nested(), (torch.randn(3, 4), {"a": torch.randn(3, 4)})
    torchair.dynamo_export(*given, model=model, export_path=str(tmp_path), dynamic=True)
    assert not model.log and not model.calls, "the model was not run"
    loaded = torchair.load(tmp_path / "export.air")
    for rows in (3, 5):
        x, more = torch.randn(rows, 4), {"a": torch.randn(rows, 4)}
        got, ends = loaded(x, more)
        expected, wanted = model(x, more)
        found = got["found"]
        assert list(found) == ["first", "rest"] and found.rest[1:] == [None, 3]
        assert found.first is found.rest[0] and got["given"][0] is more["a"]
        assert got["given"][1].data_ptr() == x.data_ptr() and type(ends) is tuple
        torch.testing.assert_close(
            (found.first, got["given"], got["n"], ends),
            (expected["found"].first, expected["given"], expected["n"], tuple(wanted)),
        )


def test_a_damaged_nesting_is_refused(tmp_path: Path) -> None:
    given = (torch.randn(3, 4), {"a": torch.randn(3, 4)})
    torchair.dynamo_export(*given, model=Nested(), export_path=str(tmp_path))
    graph = air.read_air(tmp_path / "export.air")
    note = json.loads(graph.attrs[CALL].value)
    for nesting in (
        {"result": 9},
        {"result": "x"},
        {"object": []},
        {"tuple": 3},
        {"dict": [["k"]]},
        [],
        5,
        {"weight": "no such"},
        {"argument": []},
        {"constant": [1]},
        {"fields": [[["k"], {}]]},
    ):
        graph.attrs[CALL] = attr.Str(json.dumps({**note, "nesting": nesting}))
        air.write_air(graph, tmp_path / "x.air")
        with pytest.raises(SerializationError, match=r"x\.air"):
            torchair.load(tmp_path / "x.air")


class Last(nn.Module):
    """One parameter, transposed or not."""

    def __init__(self, turned: bool = False) -> None:
        super().__init__()
        inner = nn.Linear(4, 3, bias=False)
        self.layers = nn.ModuleList([inner])
        if turned:
            inner.weight = nn.Parameter(torch.randn(4, 3).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


class Branch(nn.Module):
    """A graph with graphs inside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


class Updating(nn.Module):
    """Changes an argument."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return y + 1


def test_names_and_modules_that_the_user_wants(tmp_path: Path) -> None:
    config = torchair.CompilerConfig()
    config.export.inputs_name = ["tokens"]
    config.export.experimental.enable_record_nn_module_stack = True
    torchair.dynamo_export(
        torch.randn(2, 4),
        model=Last(),
        export_path=str(tmp_path),
        export_name="a/b/named",
        config=config,
    )
    graph = air_reader.read(tmp_path / "named.air")
    assert [op.name for op in air_reader.ops(graph, "Data")] == ["tokens"]
    stacks = {op.attr["nn_module_stack"].s.decode() for op in graph.op} - {""}
    assert stacks == {
        "{'L__self___layers_0': (\"L['self'].layers.0\", <class 'torch.nn.modules.linear.Linear'>)}"
    }
    assert torchair.load(tmp_path / "named.air").inputs[0].name == "tokens"
    assert config.export.export_mode is True and config.export.export_name == "named"
    assert config.experimental_config.enable_ref_data.value == "1"


def test_options_without_effect_are_told(tmp_path: Path) -> None:
    config = torchair.CompilerConfig()
    config.export.experimental.enable_lite_export = True
    with pytest.warns(UserWarning) as told:
        torchair.dynamo_export(
            torch.ones(2, 4), model=Last(), export_path=str(tmp_path), config=config
        )
    assert [str(w.message) for w in told] == [
        "enable_lite_export has no effect: there are no lite converters; leave it out"
    ]
    assert (tmp_path / "export.air").exists()


def test_links_are_refused_without_an_error(tmp_path: Path, caplog: Any) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    torchair.dynamo_export(torch.ones(2, 4), model=Last(), export_path=str(tmp_path / "link"))
    (real / "export.air").symlink_to(tmp_path / "elsewhere")
    torchair.dynamo_export(torch.ones(2, 4), model=Last(), export_path=str(real))
    said = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert len(said) == 2 and all("is a symbolic link" in text for text in said)
    assert [p.name for p in real.iterdir()] == ["export.air"]
    assert not (tmp_path / "elsewhere").exists()


def test_what_cannot_be_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, folder = torch.ones(2, 4), str(tmp_path)
    with pytest.raises(AssertionError, match=r"'layers.0.weight' is not contiguous"):
        torchair.dynamo_export(x, model=Last(turned=True), export_path=folder)
    config = torchair.CompilerConfig()
    config.experimental_config.frozen_parameter = True
    with pytest.raises(ValueError, match="frozen_parameter"):
        torchair.dynamo_export(x, model=Last(), export_path=folder, config=config)
    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    with pytest.raises(UnsupportedModeError, match="needs a GE graph"):
        torchair.dynamo_export(x, model=Last(), export_path=folder, config=config)
    config = torchair.CompilerConfig()
    config.export.inputs_name = ["a", "b"]
    with pytest.raises(ValueError, match="2 names for 1 inputs"):
        torchair.dynamo_export(x, model=Last(), export_path=folder, config=config)
    with pytest.raises(SerializationError, match="Python objects, which a file cannot hold"):
        torchair.dynamo_export(x, model=Branch(), export_path=folder)
    geared = torch.ones(2, 4)
    set_dim_gears(geared, {0: [2, 4]})
    for given in ({"x": geared}, {"x": x, "more": [{"y": geared}]}):
        with pytest.raises(ValueError, match="does not go with set_dim_gears, which 1 arguments"):
            torchair.dynamo_export(model=Last(), export_path=folder, **given)
    shared = torch.randn(8)
    with pytest.raises(GraphError, match="share memory that the model updates"):
        torchair.dynamo_export(shared[:4], shared[2:6], model=Updating(), export_path=folder)
    monkeypatch.setattr(air, "MAX_BYTES", 500)
    with pytest.raises(SerializationError, match="the format ends at"):
        torchair.dynamo_export(x, model=Last(), export_path=folder)
    assert not list(tmp_path.glob("*.air"))


RANK = """
import os, sys
import numpy, torch, torchair
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if sys.argv[1] == "export":
    class Half(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = torch.randn(16, 8), torch.randn(8, 16)
            self.register_buffer("a", self.up.chunk(2)[rank].contiguous())
            self.register_buffer("b", self.down.chunk(2, 1)[rank].contiguous())

        def forward(self, x):
            y = torch.relu(x @ self.a.t()) @ self.b.t()
            dist.all_reduce(y)
            return y + 1

    from torchair.deploy import export
    export.MOST_INSIDE = 100
    config = torchair.CompilerConfig()
    config.export.experimental.auto_atc_config_generated = True
    torchair.dynamo_export(torch.ones(3, 8), model=Half(), export_path="out", export_name="tp",
                           config=config)
else:
    result = torchair.load(f"out/tp{rank}.air")(torch.arange(24.0).reshape(3, 8) / 24)
    assert "torch._dynamo" not in sys.modules
    numpy.save(f"result{rank}.npy", result.numpy())
dist.destroy_process_group()
"""


def test_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    run_ranks(2, "rank.py", "export", env=ALONE, cwd=tmp_path)
    start = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc_per_node=2"]
    run = [*start, "--master_port=29612", "rank.py", "load"]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, env=ALONE, timeout=600)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    for rank in range(2):
        graph = air_reader.read(out / f"tp{rank}.air")
        (reduce,) = air_reader.ops(graph, "HcomAllReduce")
        assert reduce.attr["group"].s.decode().endswith("rank_list=0,1")
        files = sorted(p.name for p in (out / f"rank_{rank}").iterdir())
        assert files == ["a", "b", "dynamo.pbtxt"]
    relation = json.loads((out / "model_relation_config.json").read_text())
    assert [d["deploy_device_id_list"] for d in relation["deploy_config"]] == ["0:0:0", "0:0:1"]
    for part in ("deploy_config", "model_name_to_instance_id"):
        assert [d["submodel_name"] for d in relation[part]] == ["tp0.air", "tp1.air"]
    assert relation["comm_group"][0]["group_rank_list"] == "[0, 1]"
    assert (out / "numa_config.json").exists()
    torch.manual_seed(0)
    up, down = torch.randn(16, 8), torch.randn(8, 16)
    x = torch.arange(24.0).reshape(3, 8) / 24
    expected = torch.relu(x @ up.t()) @ down.t() + 1
    for rank in range(2):
        found = torch.from_numpy(np.load(tmp_path / f"result{rank}.npy"))
        torch.testing.assert_close(found, expected)
