"""Calls that eager mode refuses at run time and tracing lets pass: tensors of different types where
a kernel of torch wants one, and types that it has no code for. A GE operator would take them, so
torch's own kernel is called: it raises what eager mode raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

_NORM = "input weight bias running_mean running_var"
_ONE_TYPE: Mapping[str, str] = {
    "aten::_log_softmax_backward_data": "grad_output output",
    "aten::_native_batch_norm_legit": _NORM,
    "aten::_native_batch_norm_legit_functional": _NORM,
    "aten::_native_batch_norm_legit_no_training": _NORM,
    "aten::_softmax_backward_data": "grad_output output",
    "aten::_unsafe_index_put": "self values",
    "aten::addbmm": "self batch1 batch2",
    "aten::addmm": "self mat1 mat2",
    "aten::addmv": "self mat vec",
    "aten::addr": "vec1 vec2",
    "aten::baddbmm": "self batch1 batch2",
    "aten::binary_cross_entropy": "self target weight",
    "aten::bmm": "self mat2",
    "aten::convolution": "input weight bias",
    "aten::dot": "self tensor",
    "aten::index_add": "self source",
    "aten::index_copy": "self source",
    "aten::index_put": "self values",
    "aten::linear": "input weight bias",
    "aten::masked_scatter": "self source",
    "aten::mm": "self mat2",
    "aten::mv": "self vec",
    "aten::native_batch_norm": _NORM,
    "aten::native_group_norm": "input weight bias",
    "aten::native_layer_norm": "input weight bias",
    "aten::nll_loss2d_forward": "self weight",
    "aten::nll_loss_forward": "self weight",
    "aten::scatter": "self src",
    "aten::scatter_add": "self src",
    "aten::scatter_reduce": "self src",
    "aten::vdot": "self other",
}
"""Arguments that must have one type, by the name of the operator. Norms of short floats may have
parameters in float32; then torch's kernels and ours mix them."""
_SHORT = (torch.bfloat16, torch.float16)

_BOOL = frozenset({torch.bool})
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_NO_CODE: Mapping[str, frozenset[torch.dtype]] = {
    "aten::_adaptive_avg_pool3d": _INTEGERS | _BOOL | _COMPLEX,
    "aten::_foreach_frac": _INTEGERS | _BOOL,
    "aten::amax": _COMPLEX,
    "aten::amin": _COMPLEX,
    "aten::bernoulli.default": _INTEGERS | _BOOL,
    "aten::cholesky_inverse": _INTEGERS | _BOOL | {*_SHORT},
    "aten::cholesky_solve": _INTEGERS | _BOOL | {*_SHORT},
    "aten::im2col": _INTEGERS,
    "aten::linspace": _COMPLEX,
    "aten::nll_loss2d_forward": _INTEGERS | _BOOL,
    "aten::nll_loss_forward": _INTEGERS | _BOOL,
    "aten::pow": _BOOL,
    "aten::randint_like": _BOOL | _COMPLEX,
    "aten::rsub": _BOOL,
    "aten::sign": _COMPLEX,
    "aten::softshrink": _COMPLEX,
    "aten::sub": _BOOL,
}
"""Types of a tensor that torch's kernel refuses, at least in some calls."""


def is_refused(node: fx.Node, meta_of: Callable[[fx.Node], Any]) -> bool:
    """Whether torch's own kernel must say if a call is right; `meta_of` is what tracing saw of a
    node."""
    schema: Any = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    return _mixes_types(node, schema, meta_of) or _has_no_code(node, schema, meta_of)


def _has_no_code(node: fx.Node, schema: Any, meta_of: Callable[[fx.Node], Any]) -> bool:
    overload = f"{schema.name}.{schema.overload_name or 'default'}"
    refused = _NO_CODE.get(schema.name) or _NO_CODE.get(overload)
    if refused is None:
        return False
    metas = [meta_of(n) for n in node.all_input_nodes]
    numbers = [a for a in node.args if isinstance(a, (int, float)) and not isinstance(a, bool)]
    if schema.name == "aten::pow" and (numbers or any(m.dtype not in refused for m in metas)):
        return False  # a bool and another type give that type
    if "nll_loss" in schema.name:
        metas = metas[:1]  # classes are integers
    return any(isinstance(m, torch.Tensor) and m.dtype in refused for m in metas)


def _mixes_types(node: fx.Node, schema: Any, meta_of: Callable[[fx.Node], Any]) -> bool:
    """Whether a call has arguments of different types that torch's kernel does not mix."""
    names = _ONE_TYPE.get(schema.name)
    if names is None:
        return False
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    metas = [meta_of(n) for name in names.split() if isinstance(n := given.get(name), fx.Node)]
    types = [m.dtype for m in metas if isinstance(m, torch.Tensor)]
    if "norm" in schema.name and types[0] in _SHORT and set(types[1:]) == {torch.float32}:
        return False
    return len(set(types)) > 1
