"""Graphs that run without the model they come from, without Dynamo and without their source."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import torchair
from torchair import cli
from torchair.deploy.load import _call_of, _place
from torchair.deploy.runnable import Runnable
from torchair.devices import Device
from torchair.errors import InputError, SerializationError, TorchairError
from torchair.ge import attrs as attr
from torchair.pipeline import NpuFxCompiler
from torchair.serde import from_bytes, to_bytes, write_graph
from torchair.serde.air import read_air, write_air
from torchair.serde.convention import from_text, to_text

ALONE = {**os.environ, "PYTHONPATH": str(Path(torchair.__file__).parents[1])}

FRESH = """
import json, sys
import torch
from torchair.deploy.load import _call_of, _place
from torchair.deploy.runnable import Runnable
from torchair.devices import Device
from torchair.serde.convention import from_text

folder = sys.argv[1]
read = lambda name: open(f"{folder}/{name}", "rb").read()
call = Runnable.from_bytes(read("graph"), from_text(read("convention").decode()))
x = torch.arange(12.0).reshape(3, 4)
found, turned = call(x, torch.ones(4, 5))
wanted = torch.softmax(x @ torch.ones(4, 5), -1) + 1
assert torch.allclose(found, wanted) and turned.data_ptr() == x.data_ptr()
heavy = ("sympy", "torch._dynamo", "torch._functorch.aot_autograd", "torchair.convert")
print([m for m in heavy if m in sys.modules])
"""


class Stored:
    """A backend that notes graphs as files would hold them, before the engine changes them."""

    def __init__(self) -> None:
        self.graph, self.text, self.arguments = b"", "", []

    def __call__(self, gm: Any, inputs: Any) -> Any:
        from torch._functorch.aot_autograd import aot_module_simplified

        return aot_module_simplified(
            gm, inputs, fw_compiler=self._compile, keep_inference_input_mutations=True
        )

    def _compile(self, gm: Any, inputs: Any) -> Any:
        self.arguments = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
        made = NpuFxCompiler()(gm, inputs).runner
        self.graph, self.text = to_bytes(made.graph), to_text(made.convention)
        return made


def stored(fn: Any, *args: Any, dynamic: bool = False) -> Stored:
    torch._dynamo.reset()
    made = Stored()
    with torch.no_grad():
        torch.compile(fn, backend=made, dynamic=dynamic, fullgraph=True)(*args)
    return made


def test_a_stored_graph_runs_in_a_process_without_dynamo(tmp_path: Path) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> Any:
        return torch.softmax(x @ w, -1) + 1, x.t()

    made = stored(fn, torch.randn(3, 4), torch.randn(4, 5))
    (tmp_path / "graph").write_bytes(made.graph)
    (tmp_path / "convention").write_text(made.text)
    run = [sys.executable, "-W", "ignore", "-c", FRESH, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, env=ALONE)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_sizes_updates_and_bound_weights() -> None:
    weight = torch.nn.Parameter(torch.randn(6, 4))

    def fn(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        seen.add_(x.sum(0))
        return torch.relu(x @ weight.t()) * x.shape[0]

    x = torch.randn(3, 4)
    torch._dynamo.mark_dynamic(x, 0)
    made = stored(fn, x, torch.zeros(4))
    convention, graph = from_text(made.text), from_bytes(made.graph)
    assert convention.assigned and graph.is_dynamic
    bound = {i: weight.detach() for i, v in enumerate(made.arguments) if _dims(v) == (6, 4)}
    call = Runnable(graph, convention, bound=bound)
    for rows in (3, 7):
        x, seen, expected = torch.randn(rows, 4), torch.ones(4), torch.ones(4)
        given = {0: rows, 1: seen, 2: x}
        args = [given[len(_dims(v))] for i, v in enumerate(made.arguments) if i not in bound]
        (found,) = call(*args)
        assert_close(found, fn(x, expected))
        assert_close(seen, expected)


def _dims(argument: Any) -> tuple[Any, ...]:
    return tuple(getattr(argument, "shape", ()))


def test_results_share_memory() -> None:
    made = stored(lambda x: (lambda y: (y[1:], y, y.t()))(x + 1), torch.randn(3, 4))
    call, x = Runnable.from_bytes(made.graph, from_text(made.text)), torch.randn(3, 4)
    part, whole, turned = call(x)
    assert_close(part, x[1:] + 1)
    whole.zero_()
    assert not part.any() and not turned.any()
    with pytest.raises(SerializationError, match="nothing that a result is a part of"):
        from_text(made.text.replace('"base":{', '"base":5,"name":{'))


def test_what_does_not_fit_is_refused() -> None:
    made = stored(lambda x: x + 1, torch.randn(3))
    call = Runnable.from_bytes(made.graph, from_text(made.text))
    with pytest.raises(InputError, match="wrong number of arguments"):
        call()
    with pytest.raises(InputError, match="does not fit"):
        call(torch.randn(4))
    other = stored(lambda x, y: x + y, torch.randn(3), torch.randn(3))
    with pytest.raises(SerializationError, match="does not fit a graph with 1 inputs"):
        Runnable.from_bytes(made.graph, from_text(other.text))


@pytest.mark.parametrize(
    "damage",
    [
        ('"kind":"tensor"', '"kind":"file"'),
        ('"args":[0]', '"args":["0"]'),
        ('"cast":""', '"cast":"load"'),
        ('"is":"view"', '"is":"exec"'),
        ('"arguments":1', '"arguments":{}'),
        ("{", "["),
    ],
)
def test_a_damaged_convention_is_an_error_of_its_own(damage: tuple[str, str]) -> None:
    made = stored(lambda x: (x + 1, x.t()), torch.randn(3, 4))
    assert damage[0] in made.text
    with pytest.raises(SerializationError):
        from_text(made.text.replace(*damage, 1))


class Small(torch.nn.Module):
    """A state, weights above and below what is mapped, several results."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 40), torch.nn.Linear(40, 40)
        self.register_buffer("seen", torch.zeros(40))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        self.seen.add_(1)
        return torch.softmax(self.second(self.first(x)), -1) * self.seen + mask, x.cumsum(0)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Small]:
    torch.manual_seed(0)
    folder, model = tmp_path_factory.mktemp("small"), Small()
    torchair.dynamo_export(
        torch.randn(3, 4), torch.randn(40), model=model, export_path=str(folder), dynamic=True
    )
    return folder / "export.air", model


def test_large_weights_stay_in_the_file(small: tuple[Path, Small]) -> None:
    file, model = small
    loaded = torchair.load(file)
    weights = [t for t in loaded._run._bound if t.shape == (40, 40)]
    assert torch.equal(weights[0], model.second.weight.detach())
    lines = Path("/proc/self/maps").read_text().splitlines()
    maps = [line for line in lines if line.endswith(str(file))]
    spans = [[int(x, 16) for x in line.split()[0].split("-")] for line in maps]
    assert any(a <= weights[0].data_ptr() < b for a, b in spans)
    before = file.read_bytes()
    weights[0].zero_()
    assert file.read_bytes() == before


def test_arguments_by_name_and_missing_ones(small: tuple[Path, Small]) -> None:
    loaded = torchair.load(small[0], frozen_parameter=True)
    x, mask = torch.randn(5, 4), torch.randn(40)
    with torch.no_grad():
        expected = torch.softmax(small[1].second(small[1].first(x)), -1) + mask
    assert_close(loaded(mask=mask, x=x)[0], expected)
    assert str(loaded.inputs[0]) == "x: float32 [-1, 4]" and len(loaded.outputs) == 2
    with pytest.raises(InputError, match="an argument is missing"):
        loaded(x)
    with pytest.raises(InputError, match="too many arguments"):
        loaded(x, mask, x)
    with pytest.raises(InputError, match="the argument mask is not what"):
        loaded(x, mask[:3])


def test_damaged_files_are_refused(small: tuple[Path, Small], tmp_path: Path) -> None:
    data, chance = small[0].read_bytes(), random.Random(0)
    refused = 0
    for k in range(120):
        damaged = bytearray(data[: chance.randrange(len(data))] if k % 3 == 0 else data)
        for _ in range(chance.choice((1, 1, 4))):
            if damaged:
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        (tmp_path / "x.air").write_bytes(damaged)
        try:
            torchair.load(tmp_path / "x.air")(torch.randn(3, 4), torch.randn(40))
        except TorchairError:
            refused += 1
    assert 40 <= refused < 120  # damage inside of a weight or a name is not seen


def test_damage_inside_of_a_weight(small: tuple[Path, Small], tmp_path: Path, capsys: Any) -> None:
    data = bytearray(small[0].read_bytes())
    place = bytes(data).index(small[1].second.weight.detach().numpy().tobytes())
    data[place + 100] ^= 1
    (tmp_path / "x.air").write_bytes(data)
    torchair.load(small[0], check=True)
    with pytest.raises(SerializationError, match="second_weight is damaged"):
        torchair.load(tmp_path / "x.air", check=True)
    assert cli.main(["run-air", str(tmp_path / "x.air"), "--check"]) == 2
    assert "second_weight is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 zip", b"\x80\x04 pickle", bytes(5000)])
def test_foreign_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.air").write_bytes(content)
    with pytest.raises(SerializationError, match=r"x\.air"):
        torchair.load(tmp_path / "x.air")
    with pytest.raises(SerializationError, match="cannot read"):
        torchair.load(tmp_path / "missing.air")


def test_a_file_reaches_neither_files_nor_python(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(16))
    folder = tmp_path / "model"
    graph = from_bytes(stored(lambda x: x.digamma() + 1, torch.randn(4)).graph)
    write_graph(graph, folder / "good.air", "air")
    with torch.no_grad():
        assert_close(torchair.load(folder / "good.air")(torch.ones(4)), torch.ones(4).digamma() + 1)
    node = next(n for n in graph.nodes if n.type == "TorchCall")
    for target in ("aten::from_file", "object:0:eval", "higher_order::print"):
        node.attrs["target"] = attr.Str(target)
        write_graph(graph, folder / "bad.air", "air")
        with pytest.raises(SerializationError, match="which is not allowed in a file"):
            torchair.load(folder / "bad.air")
    node.attrs["target"] = attr.Str("no::such_operator")
    write_graph(graph, folder / "bad.air", "air")
    with pytest.raises(SerializationError, match="no operator"):
        torchair.load(folder / "bad.air")
    graph = from_bytes(stored(lambda x: x + torch.ones(4), torch.randn(4)).graph)
    _as_file_constant(graph, str(secret))
    write_graph(graph, folder / "outside.air", "air")
    with pytest.raises(SerializationError, match="not beside the model"):
        torchair.load(folder / "outside.air")


def _as_file_constant(graph: Any, path: str) -> None:
    (data,) = [n for n in graph.data]
    data.type = "FileConstant"
    data.attrs = {
        "shape": attr.ListInt([4]),
        "dtype": attr.DataType(0),
        "file_path": attr.Str(path),
        "file_id": attr.Str(""),
    }


def test_run_air(small: tuple[Path, Small], tmp_path: Path, capsys: Any) -> None:
    x, mask = torch.randn(3, 4), torch.randn(40)
    np.save(tmp_path / "x.npy", x.double().numpy())
    np.save(tmp_path / "mask.npy", mask.numpy())
    file = str(small[0])
    assert cli.main(["run-air", file]) == 0
    shown = capsys.readouterr().out
    assert "input 0: x: float32 [-1, 4]" in shown and "result 1:" in shown
    arguments = ["--input", f"mask={tmp_path}/mask.npy", "--input", f"{tmp_path}/x.npy"]
    assert cli.main(["run-air", file, *arguments, "--output", str(tmp_path), "--repeat", "2"]) == 0
    shown = capsys.readouterr().out
    assert "first call:" in shown and "2 calls: median" in shown
    with torch.no_grad():
        expected = torch.softmax(small[1].second(small[1].first(x)), -1) + mask
    assert_close(torch.from_numpy(np.load(tmp_path / "result_0.npy")), expected)
    assert cli.main(["run-air", file, *arguments[:2]]) == 2
    assert "no --input for x" in capsys.readouterr().err
    assert cli.main(["run-air", str(tmp_path / "mask.npy")]) == 2
    assert "not a GE model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((3, 5), np.float32), "the argument x is not what"),
        (np.zeros(12, np.float32), "the argument x is not what"),
        (np.array(["a"]), "torch has no dtype for <U1"),
        (np.zeros((3, 4), [("a", "f4")]), "torch has no dtype"),
        (np.zeros((3, 4), np.complex64), "complex data"),
        (np.array([None, 1]), "cannot read an array"),
        (b"no array", "cannot read an array"),
        (None, "cannot read an array"),
    ],
)
def test_run_air_on_bad_inputs(
    small: tuple[Path, Small], tmp_path: Path, capsys: Any, array: Any, words: str
) -> None:
    np.save(tmp_path / "mask.npy", np.zeros(40, np.float32))
    if isinstance(array, bytes):
        (tmp_path / "x.npy").write_bytes(array)
    elif array is not None:
        np.save(tmp_path / "x.npy", array)
    arguments = [f"x={tmp_path}/x.npy", f"mask={tmp_path}/mask.npy"]
    command = ["run-air", str(small[0]), *(p for a in arguments for p in ("--input", a))]
    assert cli.main(command) == 2
    shown = capsys.readouterr().err
    assert words in shown and "Traceback" not in shown


def test_run_air_names_inputs(small: tuple[Path, Small], tmp_path: Path, capsys: Any) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 4), ">f4"))
    np.save(tmp_path / "a=b.npy", np.zeros(40, np.float32))
    file, x = str(small[0]), f"{tmp_path}/x.npy"
    for given, words in (
        ([f"y={x}"], "no input y"),
        ([f"x={x}", f"x={x}"], "more than one file for the input x"),
        ([x, x, x], "too many inputs"),
    ):
        assert cli.main(["run-air", file, *(p for a in given for p in ("--input", a))]) == 2
        assert words in capsys.readouterr().err
    given = ["--input", x, "--input", f"{tmp_path}/a=b.npy", "--repeat", "0"]
    assert cli.main(["run-air", file, *given]) == 0, "a file whose name has a sign of equality"
    assert cli.main(["run-air", file, *given, "--output", x]) == 2
    assert "x.npy" in capsys.readouterr().err


class Corner(torch.nn.Module):
    """A generic operator that names a device, and a view of an argument that nothing reads."""

    def forward(self, x: torch.Tensor, aside: torch.Tensor) -> Any:
        return x + torch.tril_indices(3, 3, device=x.device).sum(-1), aside.t()


@pytest.fixture(scope="module")
def corner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = str(tmp_path_factory.mktemp("corner"))
    args = (torch.randn(3, 2), torch.randn(5, 2))
    torchair.dynamo_export(*args, model=Corner(), export_path=folder, dynamic=True)
    return Path(folder) / "export.air"


def test_operators_that_name_a_device_follow_the_model(corner: Path, tmp_path: Path) -> None:
    graph = read_air(corner)
    (node,) = [n for n in graph.nodes if n.type == "TorchCall"]
    named = str(node.attr("arguments"))
    assert '"cpu"' in named
    node.attrs["arguments"] = attr.Str(named.replace('"cpu"', '"cuda:3"'))  # as exported there
    write_air(graph, tmp_path / "x.air")
    args = (torch.randn(4, 2), torch.randn(5, 2))
    assert_close(torchair.load(tmp_path / "x.air")(*args), Corner()(*args))
    on_gpu = read_air(corner)
    _place(on_gpu, _call_of(on_gpu, "cuda:1").convention, "cuda:1")
    assert '"cuda:1"' in str(on_gpu.node(node.name).attr("arguments"))


def test_replays_tell_sizes_of_all_arguments_apart(
    corner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "replays", True)  # as on a GPU, but recorded by the engine
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    loaded = torchair.load(corner)
    for rows in (5, 6, 5):
        args = (torch.randn(3, 2), torch.randn(rows, 2))
        assert_close(loaded(*args), Corner()(*args))
    assert len(loaded._run._run.__self__._replay.captured) == 2


def test_a_device_that_is_not_there_is_named(corner: Path, capsys: Any) -> None:
    for device in ("mps", "nonsense"):
        with pytest.raises(InputError, match=f"no model runs on '{device}'"):
            torchair.load(corner, device=device)
        assert cli.main(["run-air", str(corner), "--device", device]) == 2
        assert f"no model runs on '{device}'" in capsys.readouterr().err


@pytest.mark.cuda
@pytest.mark.parametrize("frozen", [False, True])
@torch.no_grad()
def test_a_file_runs_on_a_gpu(small: tuple[Path, Small], frozen: bool) -> None:
    loaded = torchair.load(small[0], device="cuda", frozen_parameter=frozen)
    for calls, rows in enumerate((3, 3, 5), 1):
        x, mask = torch.randn(rows, 4), torch.randn(40)
        expected = torch.softmax(small[1].second(small[1].first(x)), -1) * calls + mask
        result, summed = loaded(x.cuda(), mask.cuda())
        assert result.is_cuda
        assert_close(result.cpu(), expected, rtol=1e-4, atol=1e-4)
        assert_close(summed.cpu(), x.cumsum(0))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((torch.zeros(3, 5), torch.zeros(40)), r"argument x (.*\n)*.*dims \[s0=3, 4\]"),
        ((torch.zeros(3, 4).double(), torch.zeros(40)), "argument x is not what"),
        ((torch.zeros(3, 4, device="meta"), torch.zeros(40)), r"argument x (.*\n)*.*one on meta"),
        ((None, torch.zeros(40)), "argument x is not what"),
        ((torch.zeros(3, 4).to_sparse(), torch.zeros(40)), "argument x is not what"),
        ((torch.zeros(3, 4), [1.0]), "argument mask is not what"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(
    small: tuple[Path, Small], given: tuple[Any, ...], words: str
) -> None:
    with pytest.raises(InputError, match=words) as caught:
        torchair.load(small[0])(*given)
    assert "Traceback" not in str(caught.value) and "arg" not in str(caught.value.name)


def test_arguments_by_wrong_names_are_refused(small: tuple[Path, Small]) -> None:
    loaded = torchair.load(small[0])
    with pytest.raises(InputError, match=r"no argument nask\. Did you mean 'mask'"):
        loaded(torch.zeros(3, 4), nask=torch.zeros(40))
    with pytest.raises(InputError, match="by position and by name"):
        loaded(torch.zeros(3, 4), torch.zeros(40), x=torch.zeros(3, 4))
