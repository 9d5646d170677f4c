"""A model or function traced once, by AOTAutograd alone, into the same pipeline as torch.compile.

Parameters and buffers become arguments; sizes that may vary become symbols, and what tracing has
assumed of them conditions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental import symbolic_shapes as shapes

from torchair.backend import boxed
from torchair.concrete.fast_path import Inference
from torchair.configs.compiler_config import CompilerConfig
from torchair.configs.options import MAX_AUTOTUNE
from torchair.deploy.guards import Expected, Spec, TracedGraph, TraceError, ValueSpec
from torchair.deploy.tensor_refs import TensorRef, look
from torchair.deploy.trees import packed
from torchair.fx.gears import combinations, gears_of, keep_to_gears
from torchair.fx.tracing import without_decomposition
from torchair.locks import in_child
from torchair.log import logger, spoken_by
from torchair.ops.hcom import traced_collectives
from torchair.pipeline import NpuFxCompiler
from torchair.torch_private import aot, pytree
from torchair.torch_private.aot import TracingContext, compiling, tracing
from torchair.torch_private.dispatch import is_traceable_wrapper_subclass
from torchair.torch_private.fake import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    shapes_config,
)
from torchair.torch_private.symbols import PythonPrinter
from torchair.torch_private.table import check
from torchair.trace import Trace, model_directory

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _Flat(torch.nn.Module):
    """The target as a function of flat arguments, parameters first. Without parameters of its own,
    or AOTAutograd would hold them."""

    def __init__(
        self,
        call: Callable[[Sequence[Any]], Any],
        refs: Sequence[Sequence[TensorRef]],
        named: Sequence[tuple[str, torch.nn.Module]],
    ) -> None:
        super().__init__()
        self._call, self.refs, self._named = call, refs, named
        self.spec: pytree.TreeSpec | None = None
        self.constants: dict[int, Any] = {}
        self.plain = True
        """Whether no tensor that it is given, and no result, is made of others."""

    def forward(self, *given: torch.Tensor) -> list[Any]:
        count = len(self.refs)
        with _attributes_restored(self._named, given), _in_place(self.refs, given[:count]):
            result = self._call(given[count:])
        leaves, self.spec = pytree.tree_flatten(packed(result))
        kinds = torch.Tensor | torch.SymInt | torch.SymFloat
        self.plain &= not any(map(is_traceable_wrapper_subclass, [*given, *leaves]))
        self.constants = {k: v for k, v in enumerate(leaves) if not isinstance(v, kinds)}
        return [v for k, v in enumerate(leaves) if k not in self.constants]


@contextmanager
def _in_place(refs: Sequence[Sequence[TensorRef]], given: Sequence[torch.Tensor]) -> Iterator[None]:
    """Modules with these tensors for their parameters and buffers. A buffer that is assigned anew
    is updated instead."""
    before = [places[0].read() for places in refs]
    _put(refs, given)
    try:
        yield
        for places, new in zip(refs, given, strict=True):
            now = look(places[0].place, places[0].key)
            if now is not new and isinstance(now, torch.Tensor):
                _update(places[0], new, now)
    finally:
        _put(refs, before)


@contextmanager
def _attributes_restored(
    modules: Sequence[tuple[str, torch.nn.Module]], given: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Modules have the attributes, parameters and buffers afterwards that they have now: what a
    model assigns while it is traced holds tensors without memory. A list of those that were
    `given`, which nn.LSTM makes of its weights, loses nothing by that; other tensors are lost."""
    tables = ("_parameters", "_buffers", "_modules")
    before = [
        (name, attributes, dict(attributes))
        for name, module in modules
        for attributes in (vars(module), *(vars(module)[t] for t in tables))
    ]
    known = set(map(id, given))
    try:
        yield
        for name, attributes, was in before:
            for key in [k for k, v in attributes.items() if was.get(k) is not v]:
                if any(id(t) not in known for t in _tensors_in(attributes[key])):
                    warnings.warn(
                        f"the model keeps a tensor in {f'{name}.{key}'.lstrip('.')} when it runs; "
                        "compiled calls do not"
                    )
    finally:
        for _, attributes, was in before:
            for key in attributes.keys() - was.keys():
                del attributes[key]
            attributes.update(was)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """A tensor, or those in a list, tuple or dict."""
    values = value.values() if isinstance(value, dict) else value
    found = values if isinstance(value, list | tuple | dict) else [value]
    return [v for v in found if isinstance(v, torch.Tensor)]


def _update(ref: TensorRef, tensor: torch.Tensor, now: torch.Tensor) -> None:
    """What assigning `now` does, done to the tensor that was there before."""
    dims = [[str(d) for d in t.shape] for t in (tensor, now)]  # comparing sizes would fix them
    if ref.loose and (dims[0] != dims[1] or tensor.dtype != now.dtype):
        warnings.warn(
            f"the model replaces {ref.name} with a tensor of a different shape or dtype when it "
            "runs; compiled calls do not support that"
        )
    else:
        tensor.copy_(now)


def _put(refs: Sequence[Sequence[TensorRef]], tensors: Sequence[torch.Tensor]) -> None:
    for places, tensor in zip(refs, tensors, strict=True):
        for ref in places:
            ref.place[ref.key] = tensor


@torch.inference_mode(False)  # in it torch takes operators apart that autocast casts for
def trace(
    call: Callable[[Sequence[Any]], Any],
    refs: Sequence[Sequence[TensorRef]],
    leaves: Sequence[Any],
    labels: Sequence[str],
    dynamic: Callable[[str, torch.Tensor], Sequence[int]],
    config: CompilerConfig,
    decompositions: Mapping[Any, Callable[..., Any]],
    from_two: bool = True,
    modules: Sequence[tuple[str, torch.nn.Module]] = (),
) -> TracedGraph:
    """Trace `call`, a function of leaves, and compile it for inference. `dynamic` tells which dims
    of an argument may vary: sizes `from_two` on, or any, as far as the model can be traced so.
    `modules` are those that it may change, with their names."""
    tensors = [k for k, v in enumerate(leaves) if isinstance(v, torch.Tensor)]
    for k, v in enumerate(leaves):
        if k not in tensors and not isinstance(v, bool | int | float | str | type(None)):
            raise TraceError(
                f"the argument {labels[k]} is a {type(v).__name__}: tensors, numbers, strings and "
                "None can be compared at each call, and tuples, lists and dicts of them",
                hint="pass the tensors that it holds, or register it with torch.utils._pytree",
            )
    env = shapes.ShapeEnv(specialize_zero_one=from_two)
    fake_mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    weights = [places[0].read() for places in refs]
    given = [_fake(fake_mode, t, ()) for t in weights]
    examples = _with_own_memory([leaves[k] for k in tensors], weights)
    known = gears_of([leaves[k] for k in tensors]) if config.mode.value == MAX_AUTOTUNE else {}
    gears: list[dict[str, int]] = []
    for n, k in enumerate(tensors):
        dims = list(known.get(n, ())) if known else dynamic(labels[k], leaves[k])
        given.append(_fake(fake_mode, examples[n], dims))
    if known:
        free, policy = given[len(refs) :], config.inference_config.dynamic_gears_merge_policy.value
        gears = combinations(free, known, policy)
        keep_to_gears(free, known)

    def on_tensors(values: Sequence[Any]) -> Any:
        every = list(leaves)
        for k, value in zip(tensors, values, strict=True):
            every[k] = value
        return call(every)

    flat = _Flat(on_tensors, refs, modules)
    seen: dict[str, Any] = {}
    fixed = frozenset(range(len(refs)))
    compiler = NpuFxCompiler(
        config, Trace("forward", model_directory(logger)), static=fixed, gears=gears
    )
    wrapped = _compiled(flat, given, compiler, config, decompositions, fake_mode, seen)
    named = iter(given[len(refs) :])
    specs: list[Spec] = [
        _spec(labels[k], v, next(named), env) if k in tensors else ValueSpec(labels[k], v)
        for k, v in enumerate(leaves)
    ]
    assert flat.spec is not None
    bare = flat.plain and Inference(True, seen["metadata"], seen["count"]).is_bare(len(given))
    written = _written(seen["metadata"].input_info, len(refs), len(tensors))
    return TracedGraph(
        seen["runner"] if bare else None,
        wrapped,
        specs,
        _conditions(env, specs),
        tensors,
        flat.spec,
        flat.constants,
        written,
        seen["unread"] & fixed if bare else frozenset(),
        seen["runner"],
    )


in_child(aot.stop_compiling_of_others)


class CacheBackend:
    """Compiles the graph that AOTAutograd makes of a flat call, whose first arguments are
    parameters; `seen` gets what it was told."""

    def __init__(self, compiler: Callable[..., Any], parameters: int, seen: dict[str, Any]) -> None:
        self._compiler, self._parameters, self._seen = compiler, parameters, seen

    def __call__(self, gm: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return self.fw_compiler(gm, example_inputs)

    def fw_compiler(self, gm: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph of AOTAutograd."""
        seen, context = self._seen, TracingContext.try_get()
        seen["metadata"], seen["count"] = getattr(context, "fw_metadata", None), len(example_inputs)
        places = gm.graph.find_nodes(op="placeholder")
        seen["unread"] = frozenset(k for k, n in enumerate(places) if not n.users)
        for x in example_inputs[: self._parameters]:
            x._torchair_is_parameter = True
        seen["runner"] = self._compiler(gm, example_inputs)
        return boxed(seen["runner"])


def _compiled(
    flat: _Flat,
    given: Sequence[Any],
    made: NpuFxCompiler,
    config: CompilerConfig,
    decompositions: Mapping[Any, Any],
    fake_mode: FakeTensorMode,
    seen: dict[str, Any],
) -> Callable[..., Any]:
    """The graph of a flat call, in AOTAutograd's wrapper; `seen` gets the graph without it."""
    check()
    backend = CacheBackend(spoken_by(logger, made), len(flat.refs), seen)

    keep = config.experimental_config.keep_inference_input_mutations
    context = tracing(TracingContext(fake_mode))
    assert fake_mode.shape_env is not None
    from_zero = not fake_mode.shape_env.specialize_zero_one
    switches: Any = shapes_config
    sizes = switches.patch(backed_size_oblivious=from_zero)
    with (
        sizes,
        without_decomposition(),
        context,
        torch.no_grad(),
        compiling(),
        traced_collectives(),
    ):
        try:
            return aot.aot_module_simplified(
                flat,
                list(given),
                fw_compiler=backend,
                inference_compiler=backend,
                decompositions=dict(decompositions),
                keep_inference_input_mutations=bool(keep),
            )
        except DynamicOutputShapeException as e:
            raise TraceError(
                f"sizes of results of {e.func} depend on its data, and torch cannot trace that",
                hint="use torch.compile, which can break the graph there",
            ) from e
        except (DataDependentOutputException, shapes.GuardOnDataDependentSymNode) as e:
            raise TraceError(
                f"the model decides by its data: {e}",
                hint="use torch.compile, which can break the graph there, or torch.cond",
            ) from e


def _written(known: Sequence[Any], weights: int, arguments: int) -> frozenset[int]:
    """Numbers of arguments that a call updates. Where weights share memory AOTAutograd has put
    others in their place: then any may be updated."""
    own, given = known[: len(known) - arguments], known[len(known) - arguments :]
    updated = [i.mutates_data for i in own] if len(own) == weights else [True] * weights
    updated += [i.mutates_data for i in given]
    return frozenset(k for k, yes in enumerate(updated) if yes)


def _with_own_memory(
    examples: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Examples of which none shares memory with another tensor: that they do is not to become part
    of the graph, since calls are with other tensors."""
    seen = {t.untyped_storage()._cdata for t in others if type(t) in _PLAIN}
    made = []
    for t in examples:
        if type(t) in _PLAIN:
            if (where := t.untyped_storage()._cdata) in seen:
                t = t.new_empty_strided(t.shape, t.stride())
            seen.add(where)
        made.append(t)
    return made


def _fake(fake_mode: FakeTensorMode, t: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    plain = t.detach()
    if plain.is_inference():  # graphs update none of these but in the mode that has made them
        plain = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    if not dims:
        return fake_mode.from_tensor(plain, static_shapes=True)
    fixed, free = shapes.DimDynamic.STATIC, shapes.DimDynamic.DYNAMIC
    kinds = [free if i in dims else fixed for i in range(t.dim())]
    context: Any = shapes.StatelessSymbolicContext(dynamic_sizes=kinds)
    return fake_mode.from_tensor(plain, symbolic_context=context)


def _spec(label: str, t: torch.Tensor, fake: torch.Tensor, env: shapes.ShapeEnv) -> Expected:
    """What an argument must be, after tracing has shown which of its dims may really vary."""
    named: dict[int, str] = {}
    for i, n in enumerate(fake.shape):
        if not isinstance(n, int) and not env.simplify(n.node.expr).is_number:
            named[i] = _print(n.node.expr)
    return Expected.of(label, t, named)


def _conditions(env: shapes.ShapeEnv, specs: Sequence[Spec]) -> list[str]:
    """What tracing has assumed of sizes, without what equal names say already."""
    dims = {d for s in specs if isinstance(s, Expected) for d in s.dims if isinstance(d, str)}
    texts: list[str] = []
    for symbol, known in env.var_to_range.items():
        if str(symbol) not in dims:
            continue
        simple = env.simplify(symbol)
        if simple != symbol:
            texts.append(f"{symbol} == {_print(simple)}")
        texts.append(f"{symbol} >= {int(known.lower)}")
        if known.upper.is_Integer and int(known.upper) < 2**62:
            texts.append(f"{symbol} <= {int(known.upper)}")
    for guard in env.guards:
        simple = env.simplify(guard.expr)
        if simple.free_symbols and {str(s) for s in simple.free_symbols} <= dims:
            texts.append(_print(simple))
    return list(dict.fromkeys(texts))


def _print(expr: Any) -> str:
    return PythonPrinter().doprint(expr)
