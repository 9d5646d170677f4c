"""Programs of torch.export: compiled, loaded from `.pt2` files, and written as model files."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.export import Dim, ExportedProgram, export
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import torchair
from torchair import cli
from torchair.deploy.exported import write_program
from torchair.errors import InputError, SerializationError


@torch.library.custom_op("test_exported::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.linear(x).relu()


class Nested(Plain):
    """Keywords, dicts and lists, a lifted constant, a number and None among results."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def forward(self, x: Any, given: Any, *, bias: Any) -> Any:
        y = self.linear(x) * self.scale + bias
        return {"y": y, "rest": [given["a"] + torch.tensor(3.0), x.shape[0], None]}


class Counting(torch.nn.Module):
    """Buffers that calls update, in place and by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(4, 8))

    def forward(self, x: Any, at: Any) -> Any:
        self.calls = self.calls + 1
        self.cache.index_copy_(0, at, x)
        return self.cache.sum(0) + self.calls


class Custom(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.ops.test_exported.twice(x) + 1


class Derived(torch.nn.Module):
    """One size is twice another one."""

    def forward(self, x: Any, y: Any) -> Any:
        return x.sum(0) + y.reshape(2, -1, 3).sum(1)[0]


class Updating(torch.nn.Module):
    def forward(self, x: Any, total: Any) -> Any:
        total.add_(x)
        return x * 2


class Views(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x.t(), x + 1, x


class Choosing(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


class Sliced(torch.nn.Module):
    def forward(self, x: Any, n: int) -> Any:
        return x[:n] * n


class Switched(torch.nn.Module):
    def forward(self, x: Any, up: bool = True) -> Any:
        return x + 1 if up else x - 1


class Case(NamedTuple):
    """A model, its example, which dims vary, other calls, and whether a file can hold it."""

    model: type[torch.nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}
    shapes: Any = None
    calls: tuple[tuple[Any, ...], ...] = ()
    in_file: bool = True


ROWS = Dim("rows", min=1, max=64)
HALF = Dim("half", min=2, max=64)


def rows(n: int) -> tuple[Any, ...]:
    return torch.randn(n, 8), {"a": torch.randn(n, 2)}


CASES = {
    "plain": Case(Plain, (torch.randn(2, 8),)),
    "nested": Case(
        Nested,
        rows(4),
        {"bias": torch.randn(4)},
        {"x": {0: ROWS}, "given": {"a": {0: ROWS}}, "bias": None},
        (rows(7), rows(1)),
    ),
    "counting": Case(
        Counting,
        (torch.randn(1, 8), torch.tensor([1])),
        calls=((torch.randn(1, 8), torch.tensor([2])),),
    ),
    "custom": Case(
        Custom, (torch.randn(3, 4),), shapes={"x": {0: ROWS}}, calls=((torch.randn(5, 4),),)
    ),
    "derived": Case(
        Derived,
        (torch.randn(4, 3), torch.randn(8, 3)),
        shapes={"x": {0: HALF}, "y": {0: 2 * HALF}},
        calls=((torch.randn(5, 3), torch.randn(10, 3)),),
    ),
    "updating": Case(Updating, (torch.randn(4), torch.randn(4))),
    "views": Case(Views, (torch.randn(4, 3),)),
    "choosing": Case(Choosing, (torch.ones(4, 3),), calls=((-torch.ones(4, 3),),), in_file=False),
    "sliced": Case(
        Sliced,
        (torch.randn(8, 3), 3),
        shapes={"x": None, "n": Dim.DYNAMIC},
        calls=((torch.randn(8, 3), 5),),
        in_file=False,
    ),
    "switched": Case(Switched, (torch.randn(3),), {"up": False}),
}


def program_of(case: Case) -> ExportedProgram:
    return export(case.model(), case.args, dict(case.kwargs), dynamic_shapes=case.shapes)


def check(case: Case, made: Any, eager: Any) -> None:
    """The same results and the same updates as eager, call after call."""
    for given in (case.args, *case.calls, case.args, *case.calls):
        ours, theirs = (copy.deepcopy((given, case.kwargs)) for _ in range(2))
        found, wanted = made(*ours[0], **ours[1]), eager(*theirs[0], **theirs[1])
        assert_close(pytree.tree_leaves(found), pytree.tree_leaves(wanted))
        assert_close(pytree.tree_leaves(ours), pytree.tree_leaves(theirs))


@pytest.mark.parametrize("name", CASES)
def test_programs_run_as_eager_compiled_and_from_both_kinds_of_files(
    name: str, tmp_path: Path
) -> None:
    case, path = CASES[name], tmp_path / "model.pt2"
    torch.export.save(program_of(case), path)  # whose modules share their buffers
    check(case, torchair.compile(torch.export.load(path)), torch.export.load(path).module())
    if not case.in_file:
        with pytest.raises((SerializationError, InputError)):
            write_program(torch.export.load(path), tmp_path / "model.air")
            torchair.load(tmp_path / "model.air")(*case.calls[0])
        return
    assert cli.main(["export", str(path), "-o", str(tmp_path / "model.air")]) == 0
    check(case, torchair.load(tmp_path / "model.air"), torch.export.load(path).module())


def test_errors_name_the_argument_and_what_the_export_allows(tmp_path: Path) -> None:
    program = program_of(CASES["nested"])
    write_program(program, tmp_path / "model.air")
    bias = torch.randn(4)
    for call in (torchair.compile(program), torchair.load(tmp_path / "model.air")):
        with pytest.raises(InputError, match=r"<= 64 .*is dim 0 of x\)"):
            call(*rows(65), bias=bias)
        with pytest.raises(InputError, match=r"given\['a'\]"):
            call(rows(4)[0], rows(5)[1], bias=bias)
        with pytest.raises(InputError, match=r"argument x is not .*(?s:.*)type float32"):
            call(rows(4)[0].double(), rows(4)[1], bias=bias)
        with pytest.raises(InputError, match="bias"):
            call(*rows(4))


def test_the_command_checks_what_the_export_allows(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "model.air"
    write_program(program_of(CASES["nested"]), path)
    names = [p.name for p in torchair.load(path).inputs]
    for count, status in ((4, 0), (65, 2)):
        given = []
        leaves = pytree.tree_leaves((rows(count), torch.randn(4)))
        for name, x in zip(names, leaves, strict=True):
            np.save(tmp_path / f"{name}.npy", x.numpy())
            given += ["--input", f"{name}={tmp_path / name}.npy"]
        assert cli.main(["run-air", str(path), *given]) == status
    told = capsys.readouterr()
    assert "<= 64" in told.err and told.out.count("first call") == 1


def test_a_pt2_file_is_loaded_and_one_that_others_may_write_is_refused(tmp_path: Path) -> None:
    program, path = program_of(CASES["plain"]), tmp_path / "model.pt2"
    torch.export.save(program, path)
    path.chmod(0o644)
    loaded = torchair.load(path)
    x = torch.randn(2, 8)
    assert_close(loaded(x), program.module()(x))
    path.chmod(0o666)
    with pytest.raises(SerializationError, match=r"others may write to it(?s:.*)trust=True"):
        torchair.load(path)
    assert_close(torchair.load(path, trust=True)(x), loaded(x))
    assert cli.main(["export", str(path), "-o", str(tmp_path / "no.air")]) == 2
    assert not (tmp_path / "no.air").exists()


def test_damaged_archives_are_one_error(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pt2"
    torch.export.save(program_of(CASES["plain"]), path)
    data = path.read_bytes()
    assert cli.main(["export", str(path), "-o", str(tmp_path / "model.txt")]) == 2
    assert not (tmp_path / "model.txt").exists()
    path.write_bytes(data[: len(data) // 2])
    logged = logging.Handler()
    monkeypatch.setattr(logged, "emit", lambda record: pytest.fail(record.getMessage()))
    log = logging.getLogger("torch.export")
    log.addHandler(logged)
    try:
        with pytest.raises(SerializationError, match=r"not a program of.*failed finding"):
            torchair.load(path)
    finally:
        log.removeHandler(logged)
    assert not log.filters
    assert cli.main(["export", str(path)]) == 2
    assert cli.main(["export", str(tmp_path / "missing.pt2")]) == 2
    told = capsys.readouterr().err
    assert "missing.pt2" in told and "Traceback" not in told
    assert cli.main(["run-air", str(path)]) == 2


def test_the_sizes_that_vary_are_those_of_the_export() -> None:
    with pytest.raises(ValueError, match="those of the export"):
        torchair.compile(program_of(CASES["plain"]), dynamic=True)
