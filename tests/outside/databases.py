"""The databases inside torch's wheel as programs: modules, higher-order operators, autograd
functions, custom operators, optimizers, and the examples of torch.export with control flow."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .trial import Program

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
NARROW = 2  # samples of a module in bfloat16


def entries() -> dict[str, Callable[[bool], Iterator[Program]]]:
    """Every entry of every database by its name, as the programs it has; they may depend on whether
    gradients are wanted."""
    # Their import registers operators and takes seconds.
    from torch.testing._internal.autograd_function_db import autograd_function_db
    from torch.testing._internal.common_modules import module_db
    from torch.testing._internal.common_optimizers import optim_db
    from torch.testing._internal.custom_op_db import custom_op_db
    from torch.testing._internal.hop_db import hop_db

    found: dict[str, Callable[[bool], Iterator[Program]]] = {}
    for info in module_db:
        found[info.name] = lambda training, info=info: _of_module(info, training)
    for database, infos in (
        ("hop", hop_db),
        ("autograd", autograd_function_db),
        ("custom_op", custom_op_db),
    ):
        for info in infos:
            variant = f".{info.variant_test_name}" if info.variant_test_name else ""
            found[f"{database}.{info.name}{variant}"] = lambda training, info=info: _of_operator(
                info, training
            )
    for info in optim_db:
        name = info.optim_cls.__name__
        found[f"optim.{name}"] = lambda training, info=info: _of_optimizer(info, training)
    for name in _examples():
        found[f"export.{name}"] = lambda _, name=name: iter([_of_example(name)])
    return found


def _of_module(info: Any, training: bool) -> Iterator[Program]:
    yield from _modules(info, torch.float32, training)
    narrow = _modules(info, torch.bfloat16, training)
    for _ in range(NARROW):
        program = next(narrow, None)
        if program is not None:
            yield program


def _modules(info: Any, dtype: torch.dtype, training: bool) -> Iterator[Program]:
    _seed()
    try:
        inputs = info.module_inputs_func(info, "cpu", dtype, False, training)
    except Exception:  # not every module has this type
        if dtype is torch.float32:
            raise
        return
    for i, given in enumerate(inputs):
        torch.manual_seed(i)
        made, call = given.constructor_input, given.forward_input
        module = info.module_cls(*made.args, **made.kwargs).to(dtype)
        if info.is_lazy:
            module(*call.args, **call.kwargs)
        yield Program(f"{_short(dtype)} {given.desc or i}", module, call.args, call.kwargs)


def _of_operator(info: Any, training: bool) -> Iterator[Program]:
    known = info.supported_dtypes("cpu") or {torch.float32}  # flex_attention names CUDA's only
    for dtype in DTYPES:
        if dtype not in known or (training and not dtype.is_floating_point):
            continue
        _seed()
        try:
            samples = list(info.sample_inputs("cpu", dtype))
        except Exception:  # some ask for gradients of integers, or multiply booleans in place
            continue
        for i, sample in enumerate(samples):
            args = (sample.input, *sample.args)
            yield Program(f"{_short(dtype)} {i}", _Call(info.op), args, sample.kwargs)


class _Call(nn.Module):
    """An operator as a module: Dynamo starts in a function of ours, as with a user's model."""

    def __init__(self, op: Callable[..., Any]) -> None:
        super().__init__()
        self.op = [op]  # in a list, which `deepcopy` leaves as it is

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.op[0](*args, **kwargs)


def _of_optimizer(info: Any, training: bool) -> Iterator[Program]:
    """Steps of an optimizer with given gradients; there is nothing to differentiate in them."""
    if training:
        return
    foreach = [False, True] if "foreach" in info.supported_impls else [None]
    for given in info.optim_inputs_func(device="cpu"):
        for together in foreach:
            torch.manual_seed(0)
            options = given.kwargs if together is None else {**given.kwargs, "foreach": together}
            module = _Step(lambda params, o=options: info.optim_cls(params, **o))
            grads = [torch.randn_like(p) for p in module.params]
            yield Program(f"float32 {given.desc} foreach={together}", module, grads)


class _Step(nn.Module):
    """Two parameters and their optimizer. A call makes a step and gives the parameters."""

    def __init__(self, optimizer: Callable[[list[nn.Parameter]], Any]) -> None:
        super().__init__()
        self.params = nn.ParameterList([torch.randn(4, 3), torch.randn(3)])
        self.optimizer = optimizer(list(self.params))

    def forward(self, *grads: torch.Tensor) -> list[torch.Tensor]:
        for p, g in zip(self.params, grads, strict=True):
            p.grad = g
        self.optimizer.step()
        return [p.detach().clone() for p in self.params]


def _examples() -> dict[str, Any]:
    from torch._export.db.examples import all_examples

    return all_examples()


def _of_example(name: str) -> Program:
    torch.manual_seed(0)
    case = _examples()[name]
    return Program("float32 0", case.model, case.example_args, case.example_kwargs or {})


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def spread(programs: Sequence[Program], most: int) -> list[Program]:
    """At most so many of them, from first to last; 0 is all."""
    if not most or len(programs) <= most:
        return list(programs)
    step = (len(programs) - 1) / max(most - 1, 1)
    return [programs[round(i * step)] for i in range(most)]
