"""How torch traces for us: the split of training graphs, guards of tensors that are made of others,
operators that are kept whole, and what is traced wrongly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from operator import attrgetter, getitem
from threading import get_ident
from typing import Any

import torch
from torch import fx

from torchair.locks import RLock, in_child
from torchair.ops.purity import has_no_dropout, is_seeded
from torchair.torch_private import functions
from torchair.torch_private.aot import (
    TracingContext,
    default_partition,
    functorch_config,
    min_cut_partition,
)
from torchair.torch_private.dispatch import DispatchKey, OpOverload
from torchair.torch_private.dynamo import (
    Guard,
    GuardBuilder,
    SubclassAttrListSource,
    get_verbose_code_parts,
)
from torchair.torch_private.fake import FakeTensor, detect_fake_mode
from torchair.torch_private.tensors import computation_dtype as get_computation_dtype


def partition(joint: fx.GraphModule, inputs: Any, *, lays_out: bool = False, **options: Any) -> Any:
    """Forward and backward graph. On an NPU the backward reads all that it needs, as in the
    original; elsewhere a minimum cut decides which cheap values it computes again. Without help
    torch keeps an operator of ours that has an effect, such as a print, in both: it belongs where
    it was traced. If it `lays_out`, convolutions and products are in the layout that is faster."""
    from torchair.fx.layouts import carry_channels_last
    from torchair.fx.losses import keep_less_of_cross_entropy
    from torchair.fx.padding import pad_products

    for node in joint.graph.nodes:
        if _is_effect(node.target):
            backward = node.meta.get("partitioner_tag") == "is_backward"
            node.meta["partitioner_tag"] = f"must_be_in_{'backward' if backward else 'forward'}"
        elif _draws_nothing(node):
            node.target = _Plain(node.target)
        elif node.target is _BATCH_NORM_BACKWARD and node.args[7]:
            node.args = (*node.args[:3], None, None, *node.args[5:])  # in training it reads neither
    if lays_out:
        carry_channels_last(joint)
    if _is_on(joint, "cuda"):
        keep_less_of_cross_entropy(joint, pads=lays_out)
    if lays_out:
        pad_products(joint)
    cut = default_partition if _is_on(joint, "npu") else min_cut_partition
    with functorch_config.patch(cse=functorch_config.cse and not _repeats_effects(joint)):
        parts = cut(joint, inputs, **options)
    for node in (n for part in parts for n in part.graph.nodes):
        if isinstance(node.target, _Plain):
            node.target = node.target.op
    return parts


_BATCH_NORM_BACKWARD = torch.ops.aten.native_batch_norm_backward.default


def _repeats_effects(joint: fx.GraphModule) -> bool:
    """Whether common subexpressions of a graph must stay apart: torch takes two equal effects, such
    as the ends of two scopes, for one."""
    seen = [
        (n.target, str(n.args), str(n.kwargs)) for n in joint.graph.nodes if _is_effect(n.target)
    ]
    return len(set(seen)) < len(seen)


def _is_on(joint: fx.GraphModule, device: str) -> bool:
    """Whether an argument of a graph is a tensor of an (emulated) device of this type."""
    given = (n.meta.get("val") for n in joint.graph.find_nodes(op="placeholder"))
    return any(isinstance(x, torch.Tensor) and x.device.type == device for x in given)


class _Plain:
    """An operator without its tags. Where one that may draw random numbers is computed again in the
    backward, torch wraps it and hands the generator's state over, whether it draws some or not."""

    def __init__(self, op: OpOverload) -> None:
        self.op = op
        self.__name__, self.__module__ = op.__name__, op.__module__  # fx asks for both

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)


def _draws_nothing(node: fx.Node) -> bool:
    """Attention without dropout."""
    target = node.target
    return is_seeded(target) and has_no_dropout(target, node.args, node.kwargs)


def _is_effect(target: Any) -> bool:
    """Prints, scopes, and collectives, which all processes must start equally often."""
    if not isinstance(target, OpOverload):
        return False
    quiet = target.namespace == "air" and not target._schema.returns
    return quiet or target.namespace == "npu_define"


# ---- guards of tensors that are made of others, as quantised parameters of torchao are
#
# Dynamo takes every such tensor apart at every call, twice, in Python, to see that it is made as it
# was. Of torchao's classes it is known which attributes tell that: those are compared instead.


_OF_ALL_TENSORS = {"dtype", "device", "shape"}
"""Attributes that the guard of the tensor itself compares; a subclass is slow to tell them."""


_GUARDING = (Guard, GuardBuilder, SubclassAttrListSource, get_verbose_code_parts)
"""Without any of these guards stay as Dynamo makes them."""


def quicken_guards() -> None:
    """Change guards of the graph that Dynamo is compiling. They refuse what they did before."""
    context = TracingContext.try_get()
    if context is None or None in _GUARDING:
        return
    guards = context.guards_context.dynamo_guards
    changed = {g: make for g in guards if (make := _quicker(g)) is not None}
    if not changed:
        return
    by_source = getattr(guards, "source_to_guards", None)  # torch 2.11 has none
    for guard in changed:
        guards.inner.discard(guard)
        if by_source is not None:
            by_source[guard.originating_source].remove(guard)
    for old, make in changed.items():
        guards.add(Guard(old.originating_source, make, stack=old.stack, user_stack=old.user_stack))


def _quicker(guard: Guard) -> Callable[[Any, Guard], None] | None:
    if guard.create_fn is GuardBuilder.TENSOR_SUBCLASS_METADATA_MATCH:
        return _guard_attributes
    if type(guard.originating_source) is SubclassAttrListSource:
        return _guard_names
    return None


def _guard_attributes(builder: GuardBuilder, guard: Guard) -> None:
    """Instead of TENSOR_SUBCLASS_METADATA_MATCH."""
    value = builder.get(guard)
    if not _is_from_torchao(value):
        GuardBuilder.TENSOR_SUBCLASS_METADATA_MATCH(builder, guard)
        return
    parts = get_verbose_code_parts(f"attributes of {guard.name}", guard)
    builder.get_guard_manager(guard).add_lambda_guard(_same_as(value), parts, guard.user_stack)


def _guard_names(builder: GuardBuilder, guard: Guard) -> None:
    """Instead of EQUALS_MATCH for the names of inner tensors: those that are there have guards of
    their own, and that others are still missing is among what `_same_as` compares."""
    source = guard.originating_source
    assert isinstance(source, SubclassAttrListSource)
    if not _is_from_torchao(builder.get(source.base)):
        GuardBuilder.EQUALS_MATCH(builder, guard)


def _is_from_torchao(value: Any) -> bool:
    """Whether a tensor is taken apart into its attributes as torchao's tensors are."""
    base = getattr(sys.modules.get("torchao.utils"), "TorchAOBaseTensor", None)
    return base is not None and type(value).__tensor_flatten__ is base.__tensor_flatten__


def _same_as(value: Any) -> Callable[[Any], bool]:
    """Whether a tensor of the same class has the same attributes beside tensors."""
    present, attributes = value.__tensor_flatten__()
    optional = getattr(value, "optional_tensor_data_names", ())
    names = [n for n in attributes if n not in _OF_ALL_TENSORS]
    names += [n for n in optional if n not in present]
    if not names:
        return lambda x: True
    read = attrgetter(*names)
    known = deepcopy(read(value))
    return lambda x: read(x) == known


# ---- operators that torch takes apart while it traces, and that one GE operator stands for


_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
_lock = RLock()


def _nearest(x: torch.Tensor, output_size: Any, scale_factors: Any) -> torch.Tensor:
    """`upsample_nearest2d.vec` as the operator that takes sizes."""
    size = functions.upsample_output_size(x.size(), output_size, scale_factors)
    return torch.ops.aten.upsample_nearest2d.default(x, size, *(scale_factors or (None, None)))


# The Python kernel that tracing gets for each operator; None leaves it to torch's own dispatch.
_KERNELS: dict[Any, Any] = {
    torch.ops.aten.upsample_nearest2d.default: None,
    torch.ops.aten.upsample_nearest2d.vec: _nearest,
}


_replaced: list[tuple[int, dict[Any, dict[Any, Any]]]] = []
"""The kernels that are replaced at present, and the thread that put them aside."""


@contextmanager
def without_decomposition() -> Iterator[None]:
    """Trace without taking these operators apart. Other backends trace as before."""
    with _lock:
        _replaced.append((get_ident(), {op: dict(op.py_kernels) for op in _KERNELS}))
        for op, kernel in _KERNELS.items():
            _set_kernels(op, dict.fromkeys(_KEYS, kernel) if kernel is not None else {})
        try:
            yield
        finally:
            _restore()


def _restore() -> None:
    for op, kernels in _replaced.pop()[1].items():
        _set_kernels(op, {k: f for k, f in kernels.items() if k in _KEYS})


@in_child
def _restore_for_others() -> None:
    """Another thread was tracing when this process was forked."""
    while _replaced and _replaced[-1][0] != get_ident():
        _restore()


def _set_kernels(op: Any, kernels: dict[Any, Any]) -> None:
    for key in _KEYS:
        op.py_kernels.pop(key, None)
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()


# ---- what some versions of torch trace wrongly


_QUANTISING = (
    torch.quantize_per_tensor,
    torch.quantize_per_tensor_dynamic,
    torch.quantize_per_channel,
)
_DEQUANTISING = (torch.dequantize, "dequantize")


def traced_wrongly(gm: Any, inputs: Sequence[Any]) -> str | None:
    """Why a graph of Dynamo cannot be traced further, None where it can. Tracing takes quantised
    tensors for plain ones, so `dequantize` for a view; where such a tensor is only dequantised,
    that does no harm. Zeros of autograd that have no memory are taken for others, too."""
    graph = getattr(gm, "graph", None)  # compiled autograd's modules have none
    made = [] if graph is None else [n for n in graph.nodes if n.target in _QUANTISING]
    read = {user.target for node in made for user in node.users}
    if not read <= set(_DEQUANTISING) or any(getattr(t, "is_quantized", False) for t in inputs):
        return "torch traces its quantised tensors as plain ones"
    if any(isinstance(t, torch.Tensor) and t._is_zerotensor() for t in inputs):
        return "an argument is zeros without memory"
    return None


_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_ITS_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def correct_fake_values(gm: fx.GraphModule) -> None:
    """Let tensors be as kernels make them: what is scattered into a tensor that repeats has places
    of its own, zeros lie as what they replace, results of some elementwise operators as those of
    others, and attention sums up in the type it computes in. What is computed from them is traced
    again."""
    corrected: set[fx.Node] = set()
    tests = (_is_zero, _repeats, _sums_up, _lies_otherwise)
    fma = getattr(torch.ops.prims, "fma", None)  # there once inductor is loaded
    for node in gm.graph.nodes:
        if fma is not None and node.target is fma.default:
            _replace_fma(node)
        if _follows(node, corrected) or any(test(node) for test in tests):
            corrected.add(node)


def _replace_fma(node: fx.Node) -> None:
    """An operator of inductor that optimizers are traced with -> what it is made of in eager."""
    a, b, c = node.args
    tensor = isinstance(b, fx.Node)
    node.target = torch.ops.aten.addcmul.default if tensor else torch.ops.aten.add.Tensor
    node.args, node.kwargs = ((c, a, b), {}) if tensor else ((c, a), {"alpha": b})


def _follows(node: fx.Node, corrected: set[fx.Node]) -> bool:
    """Whether a node is computed from what was corrected, and was traced again."""
    given = node.all_input_nodes
    pure = node.target is getitem or not getattr(_schema(node), "is_mutable", True)
    if corrected.isdisjoint(given) or not pure or "unbacked_bindings" in node.meta:
        return False
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with detect_fake_mode([n.meta["val"] for n in given]):
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
    return True


def _is_zero(node: fx.Node) -> bool:
    """Whether zeros were traced otherwise than what they replace, and now are not."""
    if node.target is not torch.ops.aten.zero.default:
        return False
    source, meta = (n.meta["val"] for n in (node.all_input_nodes[0], node))
    with meta.fake_mode:
        node.meta["val"] = torch.empty_like(source)
    return str(node.meta["val"].stride()) != str(meta.stride())  # symbols compared are guarded


def _repeats(node: fx.Node) -> bool:
    """Whether a tensor in new memory was traced as one that repeats, and now is none."""
    schema, meta = _schema(node), node.meta.get("val")
    if schema is None or not isinstance(meta, FakeTensor) or schema.returns[0].alias_info:
        return False
    dims = [(n, s) for n, s in zip(meta.shape, meta.stride(), strict=True) if isinstance(s, int)]
    if all(step or (isinstance(n, int) and n < 2) for n, step in dims):
        return False
    with meta.fake_mode:
        node.meta["val"] = torch.empty_like(meta)
    return True


_ATEN = torch.ops.aten
_AS_OTHERS = (
    _ATEN.copysign.Tensor, _ATEN.floor_divide.default, _ATEN.heaviside.default,
    _ATEN.logaddexp.default, _ATEN.logaddexp2.default, _ATEN.logical_and.default,
    _ATEN.logical_or.default, _ATEN.logical_xor.default, _ATEN.xlogy.Tensor,
    _ATEN.special_xlog1py.default, _ATEN.complex.default, _ATEN.polar.default,
)  # fmt: skip
"""Traced by formulas that lay their results out otherwise than the kernels. Those of all
elementwise kernels lie as those of a comparison, whose tracing is right."""
_CONTIGUOUS = (_ATEN.pow.Scalar, _ATEN.log_sigmoid_forward.default)
"""Traced as elementwise operators, but their kernels give contiguous results."""


def _lies_otherwise(node: fx.Node) -> bool:
    """Whether a result was traced with other strides than its kernel gives, and now is not."""
    if node.target not in _AS_OTHERS and node.target not in _CONTIGUOUS:
        return False
    found = node.meta["val"]
    metas = found if isinstance(found, tuple) else (found,)
    with metas[0].fake_mode:
        if node.target in _CONTIGUOUS:
            made = [torch.empty_like(m, memory_format=torch.contiguous_format) for m in metas]
        else:
            given: Any = fx.map_arg(node.args, lambda n: n.meta["val"])
            # A number is a tensor without dims, as in `7 // x`.
            tensors = [t if isinstance(t, torch.Tensor) else torch.scalar_tensor(0) for t in given]
            strides = torch.eq(*tensors).stride()
            made = [m.new_empty_strided(m.shape, strides) for m in metas]
    # Symbols that are compared would be guarded.
    if [str(m.stride()) for m in made] == [str(m.stride()) for m in metas]:
        return False
    node.meta["val"] = tuple(made) if isinstance(found, tuple) else made[0]
    return True


def _sums_up(node: fx.Node) -> bool:
    """Whether a node is attention whose sums were traced in another type than they have."""
    given: Any = node.args
    if node.target is _ITS_BACKWARD:
        given[5].meta["val"] = _typed(given[5].meta["val"], given[1].meta["val"])
    if node.target is not _ATTENTION:
        return False
    out, sums = node.meta["val"]
    node.meta["val"] = (out, _typed(sums, given[0].meta["val"]))
    return node.meta["val"][1] is not sums


def _typed(sums: Any, query: Any) -> Any:
    with sums.fake_mode:
        return sums.to(get_computation_dtype(query.dtype))


def _schema(node: fx.Node) -> Any:
    return getattr(node.target, "_schema", None)
