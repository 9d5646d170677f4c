"""Where the time of one compiled call goes: Dynamo, our Python, native code; and what the ways to
call a model cost.

Each layer is measured with the one below it replaced by nothing, or entered directly; the parts
are differences of these. Alone a part finds its data in the first cache, together they take it
from each other, so the whole is more than the sum.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch

import torchair
from common import console, interleaved, table, warn_if_busy
from contestants import APART, torchair_backend
from inside import driver_of
from workloads import WORKLOADS

Inputs = tuple[torch.Tensor, ...]
Call = Callable[[], Any]
_FIRST = 6  # calls, after which the quick ways are there


class PlusOne(torch.nn.Module):
    """The smallest model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def _plus_one() -> tuple[torch.nn.Module, Inputs]:
    return PlusOne(), (torch.zeros(2, 2),)


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, Inputs]]] = {
    "x + 1 on 2 x 2": _plus_one,
    "tiny MLP b1, 64 parameters": WORKLOADS["tiny MLP b1"].build,
    "Llama tiny decode": WORKLOADS["Llama tiny decode"].build,
}


def empty_backend(result: torch.Tensor) -> Callable[..., Any]:
    """A backend whose graphs do nothing: what is left is Dynamo."""
    return lambda graph, examples: lambda *args: (result,)


class Subject:
    """A model, ready to be called in one way or another."""

    def __init__(self, model: torch.nn.Module, inputs: Inputs, frozen: bool) -> None:
        self.model, self.inputs, self.frozen = model, inputs, frozen

    def _warm(self, call: Callable[..., Any]) -> Call:
        for _ in range(_FIRST):
            call(*self.inputs)
        return lambda: call(*self.inputs)

    def compiled(self, backend: Any = None, filter_: Any = None) -> Call:
        """Through torch.compile, with the guards that a filter leaves."""
        return self._warm(torch.compile(self.model, **self._keywords(backend, filter_)))

    def in_place(self, filter_: Any = None) -> Call:
        """Through `model.compile()`, on a copy with the same parameters."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        model = copy.deepcopy(self.model, {id(t): t for t in tensors})
        model.compile(**self._keywords(None, filter_))
        return self._warm(model)

    def _keywords(self, backend: Any, filter_: Any) -> dict[str, Any]:
        options = {} if filter_ is None else {"options": {"guard_filter_fn": filter_}}
        backend = torchair_backend(self.frozen) if backend is None else backend
        return {"backend": backend, "dynamic": False, "fullgraph": True, **options, **APART}

    def graph(self) -> Call:
        """The graph as Dynamo's code calls it."""
        seen: list[Any] = []
        backend = torchair_backend(self.frozen)

        def watched(gm: Any, examples: Any) -> Callable[..., Any]:
            made = backend(gm, examples)

            def call(*args: Any) -> Any:
                seen[:] = made, args
                return made(*args)

            return call

        self.compiled(watched)
        made, args = seen
        return lambda: made(*args)

    def direct(self) -> Call:
        """Through torchair.compile."""
        return self._warm(torchair.compile(self.model, backend=torchair_backend(self.frozen)))


def depths(subject: Subject) -> dict[str, Call]:
    """The call entered at every depth, from the outside to the native code."""
    result = subject.model(*subject.inputs)
    calls = {
        "all": subject.compiled(),
        "dynamo": subject.compiled(empty_backend(result)),
        "graph": subject.graph(),
    }
    driver = driver_of(subject.model, subject.inputs, torchair_backend(subject.frozen))
    return calls if driver is None else {**calls, "driver": driver}


EAGER, USUAL, DIRECT = "eager", "torch.compile(model)", "torchair.compile(model)"
UNGUARDED, IN_PLACE = "skip_model_guards_unsafe", "model.compile()"


def ways(subject: Subject) -> dict[str, Call]:
    """Ways to call the model."""
    filters = {
        "skip_guard_on_all_nn_modules_unsafe": torch.compiler.skip_guard_on_all_nn_modules_unsafe,
        UNGUARDED: torchair.skip_model_guards_unsafe,
    }
    calls = {
        EAGER: lambda: subject.model(*subject.inputs),
        IN_PLACE: subject.in_place(),
        **{f"torch.compile, {name}": subject.compiled(None, f) for name, f in filters.items()},
        f"{IN_PLACE}, {UNGUARDED}": subject.in_place(torchair.skip_model_guards_unsafe),
        DIRECT: subject.direct(),
    }
    with torch._dynamo.config.patch(use_recursive_dict_tags_for_guards=True):
        calls["torch.compile, use_recursive_dict_tags_for_guards"] = subject.compiled()
        calls[f"{IN_PLACE}, use_recursive_dict_tags_for_guards"] = subject.in_place()
    return calls


def split(times: dict[str, float]) -> dict[str, float]:
    """Seconds of each part."""
    native = times.get("driver", 0.0)
    parts = {
        "Dynamo: guards and frame": times["dynamo"],
        "ours: checks, results, addresses": times["graph"] - native,
        "native code, with its entry": native,
    }
    parts["more together than alone"] = times["all"] - sum(parts.values())
    return {name: seconds for name, seconds in parts.items() if seconds}


def show(name: str, times: dict[str, float], others: dict[str, float]) -> None:
    """One table: the parts of a call, then the ways to call."""
    shown = table(f"one call of {name}", ["part", "us", "share"])
    whole = {USUAL: times["all"], **others}
    for lot in (split(times), whole):
        for part, seconds in lot.items():
            shown.add_row(part, f"{seconds * 1e6:.1f}", f"{seconds / times['all']:.0%}")
        shown.add_section()
    console.print(shown)


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short windows, small models")
    parser.add_argument("--frozen", action="store_true", help="with frozen_parameter")
    options = parser.parse_args()
    warn_if_busy()
    small = {name: build for name, build in MODELS.items() if "Llama" not in name}
    windows = (4, 0.01) if options.quick else (20, 0.05)
    for name, build in (small if options.quick else MODELS).items():
        torch._dynamo.reset()
        with console.status(f"{name}: compiling"):
            subject = Subject(*build(), options.frozen)
            inner, outer = depths(subject), ways(subject)
        times = interleaved({**inner, **outer}, *windows)
        stance = f"{USUAL}, skip_guard_eval_unsafe"
        with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
            unguarded = interleaved({stance: inner["all"]}, *windows)
        show(name, times, {way: times[way] for way in outer} | unguarded)


if __name__ == "__main__":
    main()
