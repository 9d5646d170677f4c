"""Walk an FX graph and build the GE graph that means the same.

The driver: placeholders become Data, calls go to converters or to the generic node, the output
becomes NetOutput plus a description of what GE does not compute. Meaning lives elsewhere.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchair import ge
from torchair.convert.air import Scopes
from torchair.convert.automatic import attach_rule, automatic_entry
from torchair.convert.exact import keeps_bits
from torchair.convert.generic import FUNCTIONALIZED, Opaque, Scalar, generic_update, torch_call
from torchair.convert.refusals import is_refused
from torchair.convert.registry import Decline, Registration, find
from torchair.convert.results import SYMBOLS, Results, bases, creator, may_be, spec_of
from torchair.convert.shape import ViewFolder
from torchair.convert.strided import number, offset_of, place_in_argument, reads_raw_memory
from torchair.convert.tokens import NO_TOKEN, WITH_EFFECTS, call_of, is_token
from torchair.errors import ConversionError
from torchair.fallbacks import Fallback, note
from torchair.fx.passes.memory import is_bent
from torchair.fx.source import module_stack, origin_of
from torchair.ge import attrs as attr
from torchair.ge.dtypes import DataType, torch_to_ge, type_of_meta
from torchair.ge.graph import Fact, Graph, Node, Origin, Value
from torchair.ge.prototypes import is_users
from torchair.ge.shapes import Sym, from_torch, symbol
from torchair.ge.signature import Conversion, InputSource, Signature
from torchair.log import logger
from torchair.operators.core import SIDE_EFFECTS
from torchair.operators.opaque import is_opaque, real_object
from torchair.ops.purity import is_foreign
from torchair.torch_private.dispatch import HigherOrderOperator, OpOverload, OpOverloadPacket
from torchair.torch_private.fake import FakeTensorMode, detect_fake_mode, unset_fake_temporarily

aten = torch.ops.aten
NUMBERS = (bool, int, float)
_EMPTY = (
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
_MARKS = (
    "air::scope_enter",
    "air::scope_exit",
    "air::record",
    "air::wait",
    "air::record_tagged_stream",
)


@dataclass
class ValuePack:
    """What an FX value is at compile time: the fake result, and what the GE graph has for it."""

    meta: Any
    npu: Any = None

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(self.meta, dict):
            raise ValueError(f"a pack of {type(self.meta).__name__} has no items")
        return ValuePack(self.meta[key], self.npu[key])


class GraphConverter:
    """Converts one FX graph; `run` gives the GE graph and how to call it."""

    def __init__(
        self,
        gm: fx.GraphModule,
        name: str,
        infer: Callable[[Node], Sequence[Fact]],
        *,
        fold_views: bool = True,
        strict: bool = False,
        static_args: frozenset[int] = frozenset(),
        record_modules: bool = False,
        exact: bool = False,
    ) -> None:
        """With `exact`, torch's own kernels compute whatever generated code might round
        differently."""
        self.gm = gm
        self.graph = Graph(name, infer)
        self.signature = Signature()
        self.generic: dict[str, int] = {}
        self.views = ViewFolder(fold_views)
        self._strict = strict
        self._static = static_args
        self._record_modules = record_modules
        self._exact = exact
        marked = any(_is_air(n.target) for n in gm.graph.nodes)
        self._scopes = Scopes() if marked else None
        self._env: dict[fx.Node, ValuePack] = {}
        self._texts: set[str] = set()
        self._arg_of: dict[fx.Node, int] = {}
        self._fake_mode: Any = None
        self._bases = bases(gm)  # nodes whose dims are not guarded
        self._last_effect: Node | None = None  # of those that torch orders by tokens
        self._pending: dict[fx.Node, Value] = {}  # arguments that are not as they lie in memory

    def run(self, *example_inputs: Any) -> Conversion:
        """Convert every FX node in order."""
        self._fake_mode = detect_fake_mode(example_inputs) or FakeTensorMode(
            allow_non_fake_inputs=True
        )
        inputs = iter(example_inputs)
        with unset_fake_temporarily(), self.graph:
            for node in self.gm.graph.nodes:
                if node.op == "placeholder":
                    self._placeholder(node, next(inputs))
                elif node.op == "get_attr":
                    self._constant(node)
                elif node.op == "output":
                    self._output(node)
                else:
                    self._call(node)
        self._random_inputs()
        return Conversion(self.graph, self.signature, self.generic)

    # ---- inputs ----

    def _placeholder(self, node: fx.Node, example: Any) -> None:
        arg = len(self._arg_of)
        self._arg_of[node] = arg
        self.signature.arguments = arg + 1
        meta = node.meta.get("val", example)
        if is_token(node):
            self._env[node] = ValuePack(meta, NO_TOKEN)
        elif isinstance(meta, torch.Tensor):
            data = self._tensor_input(node, arg, meta)
            self._env[node] = ValuePack(meta, self._resolved(node, data) if is_bent(meta) else data)
        elif isinstance(meta, (*SYMBOLS, *NUMBERS)):
            self._env[node] = ValuePack(meta, self._scalar_input(node, arg, meta))
        elif is_opaque(meta):
            self._env[node] = ValuePack(meta, self._opaque_input(node, arg))
        else:
            self._env[node] = ValuePack(meta, meta)

    def _tensor_input(self, node: fx.Node, arg: int, meta: torch.Tensor) -> Value:
        dims = self._dims(node, meta)
        for i, d in enumerate(dims):
            if isinstance(d, Sym) and d.expr.is_Symbol:
                self.signature.symbols.setdefault(d.expr.name, (arg, i))
        dtype = torch_to_ge(meta.dtype)
        self.signature.inputs.append(InputSource((arg,), "tensor", dtype, arg in self._static))
        return ge.Data(
            index=len(self.signature.inputs) - 1,
            dtype=dtype,
            shape=list(dims),
            placement="CPU" if meta.device.type == "cpu" else "NPU",
            node_name=node.name,
        )

    def _resolved(self, node: fx.Node, data: Value) -> Value:
        """An argument with a pending conjugation or negation, as numbers in memory."""
        self._pending[node] = data
        (plain,) = torch_call(aten.clone.default, (data,), {}, 1, {}).outputs
        plain.learn(data.fact)
        return plain

    def _update_pending(self, node: fx.Node) -> Value:
        """The update of such an argument: torch writes what its readers see as the new value."""
        owner, value = node.args[:2]
        read = self._env[owner].npu  # type: ignore[index]
        given = (self._pending[owner], self.views.emit(self._packed(value)))  # type: ignore[index]
        made = torch_call(node.target, given, {}, 1, {})
        made.after(read.node)
        self.graph.keep_alive.append(made)
        return made.outputs[0]

    def _dims(self, node: fx.Node, meta: torch.Tensor) -> tuple[Any, ...]:
        """Dims of a tensor as tracing saw them, or as they come where they are not guarded."""
        base = self._bases.get(node)
        if base is None:
            return tuple(from_torch(d) for d in meta.shape)
        return tuple(symbol(f"base{self._arg_of[base]}_{i}") for i in range(meta.dim()))

    def _scalar_input(self, node: fx.Node, arg: int, meta: Any) -> Value:
        dtype = type_of_meta(meta)
        read_as = {getattr(user.meta.get("val"), "dtype", None) for user in node.users}
        if dtype == DataType.DT_FLOAT and torch.float64 in read_as:
            dtype = DataType.DT_DOUBLE
        self.signature.inputs.append(InputSource((arg,), "scalar", dtype))
        index = len(self.signature.inputs) - 1
        value = ge.Data(index=index, dtype=dtype, shape=[], placement="CPU", node_name=node.name)
        expr = _symbol_of(meta)
        if isinstance(expr, Sym) and expr.expr.is_Symbol:
            self.signature.symbols[expr.expr.name] = (arg, None)
        if dtype == DataType.DT_INT64:
            value.content = expr
        return value

    def _opaque_input(self, node: fx.Node, arg: int) -> Value:
        """A handle: each call hands over an object of its own."""
        dtype = DataType.DT_INT64
        self.signature.inputs.append(InputSource((arg,), "opaque", dtype))
        index = len(self.signature.inputs) - 1
        return ge.Data(index=index, dtype=dtype, shape=[], placement="CPU", node_name=node.name)

    def _random_inputs(self) -> None:
        """Inputs that random converters have added; no argument feeds them."""
        for node in self.graph.data[len(self.signature.inputs) :]:
            data = node.outputs[0]
            count: Any = data.shape[0]  # type: ignore[index]
            self.signature.inputs.append(InputSource((), "random", data.dtype, count=count))

    def _constant(self, node: fx.Node) -> None:
        found: Any = self.gm
        for part in str(node.target).split("."):
            found = getattr(found, part)
        if isinstance(found, torch.Tensor):
            plain = found.resolve_conj().resolve_neg()
            self._env[node] = ValuePack(node.meta.get("val", found), ge.Const(plain))
        else:
            self._env[node] = ValuePack(found, real_object(found))

    # ---- calls ----

    def _call(self, node: fx.Node) -> None:
        origin = origin_of(node)
        self._comment(origin)
        self.graph.origin = origin or Origin(fx_name=node.name, target=str(node.target))
        first = len(self.graph)
        meta = self._meta(node)
        npu = self._dispatch(node, meta)
        created = self.graph.newest(len(self.graph) - first)
        self._finish(node, meta, npu, created)
        if self._record_modules and (modules := module_stack(node)):
            for made in created:
                made.attrs["nn_module_stack"] = attr.Str(modules)
        if any(is_users(n.type) for n in created):
            attach_rule(node.target, self._traced(node.args), self._traced(node.kwargs), created)
        self._env[node] = ValuePack(meta, npu)
        self.graph.origin = None

    def _comment(self, origin: Origin | None) -> None:
        if origin is None:
            return
        if origin.file not in self._texts:
            self._texts.add(origin.file)
            self.graph.journal += ["", origin.file]
        self.graph.journal.append(origin.fx)

    def _meta(self, node: fx.Node) -> Any:
        if "val" in node.meta:
            return node.meta["val"]
        if _is_air(node.target):
            return None
        args, kwargs = self._traced(node.args), self._traced(node.kwargs)
        with self._fake_mode:
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
        return node.meta["val"]

    def _traced(self, x: Any) -> Any:
        return fx.map_arg(x, self._meta_of)

    def _meta_of(self, node: fx.Node) -> Any:
        return self._env[node].meta

    def _dispatch(self, node: fx.Node, meta: Any) -> Any:
        target: Any = node.target
        logger.debug("target: %s", target)
        if _is_air(target):
            return self._air(node)
        if target is aten.copy_.default and node.args[0] in self._pending:
            return self._update_pending(node)
        if target is WITH_EFFECTS:
            return self._with_effect(node, meta)
        if target is operator.getitem:
            return self._packed(node.args[0])[self._packed(node.args[1])]
        if isinstance(meta, NUMBERS):
            if is_foreign(target):
                self._generic(node, meta)
            return meta
        if _all_empty(meta) and not is_foreign(target) and not is_refused(node, self._meta_of):
            return _map(lambda m: ge.Const(torch.empty(m.shape, dtype=m.dtype)), meta)
        entry = find(target) or automatic_entry(target)
        plain = not any(isinstance(v, Value) for v in _leaves(self._packed(node.args)))
        if entry is None and plain and not _is_operator(target):
            return target(*self._packed(node.args), **self._packed(dict(node.kwargs)))
        if self._exact and not keeps_bits(node):
            return self._generic(node, meta)
        placed = offset_of(node) is not None and self._begins_anywhere(node)
        if entry is None or (not entry.by_user and (placed or is_refused(node, self._meta_of))):
            return self._generic(node, meta)
        return self._convert(node, entry, meta)

    def _convert(self, node: fx.Node, entry: Registration, meta: Any) -> Any:
        mark = (len(self.graph.journal), len(self.graph))
        try:
            args = [self._argument(a) for a in node.args]
            kwargs = {k: self._argument(v) for k, v in node.kwargs.items()}
            if "views" not in entry.wants:  # after lists of sizes are packed
                args = _map(self.views.emit, args)
                kwargs = {k: _map(self.views.emit, v) for k, v in kwargs.items()}
            kwargs |= {name: self._asked(name, node, meta) for name in entry.wants}
            npu = entry.fn(*args, **kwargs)
            self._check(meta, npu, entry.by_user)
            return npu
        except Decline as e:
            self._undo(*mark)
            logger.debug("converter of %s declined: %s", node.target, e)
            return self._generic(node, meta)
        except Exception as e:
            if entry.by_user or self._strict:
                text = f"the converter of {node.target} failed: {type(e).__name__}: {e}"
                raise self._error(node, text, f"look at the converter {_place(entry)}") from e
            self._undo(*mark)
            note(Fallback.CONVERTER, f"the converter of {node.target} failed", e)
            return self._generic(node, meta)

    def _asked(self, name: str, node: fx.Node, meta: Any) -> Any:
        """What a converter asked for by a parameter."""
        if name == "meta_outputs":
            return _map(spec_of, meta)
        if name == "reads":
            return _reads(node)
        if name == "views":
            apart = self._scopes is not None and self._scopes.blocks_view_folding
            return self.views if self.views.enabled and not apart else ViewFolder(False)
        return self._traced(node.args if name == "meta_inputs" else node.kwargs)

    def _undo(self, journal: int, nodes: int) -> None:
        del self.graph.journal[journal:]
        gone = self.graph.newest(len(self.graph) - nodes)
        self.views.forget(gone)
        for node in reversed(gone):
            self.graph.remove(node)

    def _argument(self, x: Any) -> Any:
        """An FX argument as converters see it: values for tensors, a Pack for symbolic lists."""
        if isinstance(x, (list, tuple)) and any(self._is_symbol(e) for e in x):
            return self._pack([self._packed(e) for e in x])
        if isinstance(x, (list, tuple)):
            return [self._argument(e) for e in x]
        return self._packed(x)

    def _is_symbol(self, x: Any) -> bool:
        return isinstance(x, fx.Node) and isinstance(self._env[x].meta, (int, *SYMBOLS))

    def _pack(self, members: list[Any]) -> Any:
        if not any(isinstance(m, Value) for m in members):
            return members
        packed = ge.Pack(members, N=len(members), axis=0)
        packed.node.attrs["_force_unknown_shape"] = attr.Bool(True)
        values = [v for v in members if isinstance(v, Value)]
        if all(v.node.type == "Data" for v in values) and len(values) == len(members):
            packed.node.attrs["_inputs_all_sym"] = attr.Bool(True)
        return packed

    def _packed(self, x: Any) -> Any:
        return fx.map_arg(x, lambda n: self._env[n].npu)

    def _air(self, node: fx.Node) -> Any:
        name, args = node.target._schema.name, self._packed(node.args)  # type: ignore[union-attr]
        assert self._scopes is not None
        if name == "air::scope_enter":
            return self._scopes.enter(*args[:2])
        if name == "air::scope_exit":
            return self._scopes.exit()
        if name == "air::record":
            return self._scopes.record()
        if name == "air::record_tagged_stream":
            return None  # the plan knows all readers of a buffer, in whatever lane they are
        return self._scopes.wait([self.views.emit(m) for m in args[0]])

    def _generic(self, node: fx.Node, meta: Any) -> Any:
        changes = node.target is FUNCTIONALIZED
        name = str(node.args[0] if changes else node.target)
        if self._strict:
            raise self._error(node, f"{name} ge_converter is not implemented!")
        self.generic[name] = self.generic.get(name, 0) + 1

        metas: dict[Value, torch.Tensor] = {}

        def argument(n: fx.Node) -> Any:
            pack = self._env[n]
            if isinstance(pack.meta, SYMBOLS) and isinstance(pack.npu, Value):
                return Scalar(pack.npu)
            if isinstance(pack.npu, Value) and is_opaque(pack.meta):
                return Opaque(pack.npu)
            found = _map(self.views.emit, pack.npu)
            known = zip(_leaves(found), _leaves(pack.meta), strict=False)
            metas.update((v, m) for v, m in known if isinstance(m, torch.Tensor))
            return found

        target, args, kwargs = call_of(node)
        args, kwargs = fx.map_arg((args, kwargs), argument)
        if changes and (found := self._functional(node, kwargs, metas)) is not None:
            return found
        if self._begins_anywhere(node):
            return self._read_of_argument(node, meta, argument)
        if reads_raw_memory(node):
            raise self._error(node, f"{name} on a computed tensor depends on its memory layout")
        made = torch_call(target, args, kwargs, _places(meta), metas, self._exact)
        if meta is None or _mutates(target):
            self.graph.keep_alive.append(made)
        return _fill(meta, iter(made.outputs))

    def _with_effect(self, node: fx.Node, meta: Any) -> Any:
        """A call that stays, after the one before it that has an effect."""
        results = self._generic(node, meta[1:])
        made = self.graph.nodes[-1]
        if self._last_effect is not None:
            made.after(self._last_effect)
        self._last_effect = made
        self.graph.keep_alive.append(made)
        return [NO_TOKEN, *results]

    def _begins_anywhere(self, node: fx.Node) -> bool:
        """Whether a node reads memory of an argument by `as_strided`. Where arguments begin is not
        guarded, but for those that are memory alone."""
        if node.target is not aten.as_strided.default:
            return False
        owner = creator(node.args[0], self._meta_of)  # type: ignore[arg-type]
        return owner.op == "placeholder" and owner not in self._bases

    def _read_of_argument(self, node: fx.Node, meta: torch.Tensor, value: Any) -> Value:
        """What `as_strided` finds in the memory of an argument, where that lies in each call."""
        owner, offset, after = place_in_argument(node, self._meta_of)
        if self._meta_of(owner).dtype != meta.dtype:
            raise self._error(node, f"{node.target} of an argument that is seen as another type")
        size, stride = (list(fx.map_arg(a, value)) for a in node.args[1:3])  # type: ignore[arg-type]
        read_from = self._pending.get(owner) or value(owner)
        given = [read_from, size, stride, fx.map_arg(offset, value)]
        if after != 0:  # where that is depends on the first of two windows
            given[1:3] = [2, *size], [number(after), *stride]
        (read,) = torch_call(node.target, given, {}, 1, {}).outputs
        if after == 0:
            return read
        read.learn(Fact(torch_to_ge(meta.dtype), (2, *self._dims(node, meta))))
        return ge.GatherV2(read, ge.Const(1, dtype=DataType.DT_INT64), [0])

    def _functional(self, node: fx.Node, kwargs: Any, metas: dict[Value, torch.Tensor]) -> Any:
        """A generic node that changes arguments, None where views of them are too involved."""
        traced = self._traced(dict(node.kwargs))
        fresh = all(_is_empty(base) for base in node.kwargs["_all_bases"])  # type: ignore[union-attr]
        mark = (len(self.graph.journal), len(self.graph))
        given = {k: self._argument(v) for k, v in node.kwargs.items() if k[:1] == "_"}
        views = {k: _map(self.views.emit, v) for k, v in given.items()}
        try:
            return generic_update(node.args[0], {**kwargs, **views}, traced, metas, fresh)
        except Decline as e:
            self._undo(*mark)
            logger.debug("%s is kept as torch has it: %s", node.target, e)
            return None

    def _error(self, node: fx.Node, text: str, hint: str | None = None) -> ConversionError:
        target = node.args[0] if node.target is FUNCTIONALIZED else node.target
        schema = str(target._schema) if isinstance(target, OpOverload) else ""
        origin = origin_of(node)
        source = origin.line if origin else ""
        return ConversionError(text, op=target, schema=schema, source=source, hint=hint)

    # ---- results of a call ----

    def _check(self, meta: Any, npu: Any, by_user: bool) -> None:
        """A converter must give one value per result, of the type and dims that tracing saw."""
        expected, got = _leaves(meta), _leaves(npu)
        if len(expected) != len(got):
            raise ValueError(f"{len(got)} results instead of {len(expected)}")
        for m, v in zip(expected, got, strict=True):
            if isinstance(m, torch.Tensor) and isinstance(v, Value):
                wanted = torch_to_ge(m.dtype)
                if v.dtype not in (wanted, DataType.DT_UNDEFINED):
                    raise ValueError(f"result {v} should have type {m.dtype}")
                if not may_be(v.shape, m.shape):
                    reason = f"result {v} should have dims {list(m.shape)}"
                    raise ValueError(reason) if by_user else Decline(reason)

    def _finish(self, node: fx.Node, meta: Any, npu: Any, created: list[Node]) -> None:
        if self._scopes is not None:
            self._scopes.stamp(created)
        new = set(created)
        for i, (m, v) in enumerate(zip(_leaves(meta), _leaves(npu), strict=False)):
            if not isinstance(v, Value) or v.node not in new:
                continue
            if isinstance(m, torch.Tensor):
                v.learn(Fact(torch_to_ge(m.dtype), self._dims(node, m)))
                v.attrs["_meta"] = attr.Str(f"Tensor(dtype={m.dtype}, shape={m.shape})")
            elif isinstance(m, SYMBOLS):
                known = _symbol_of(m) if isinstance(m, torch.SymInt) else None
                exact = v.dtype != DataType.DT_UNDEFINED  # a symbolic float is kept in double
                v.learn(Fact(v.dtype if exact else type_of_meta(m), (), known))
            v.attrs["_fx_tensor_name"] = attr.Str(f"{node.name}-{node.target}.OUTPUT.{i}")

    # ---- outputs ----

    def _output(self, node: fx.Node) -> None:
        self.graph.origin = None
        items: Any = node.args[0]
        results = Results(
            self._arg_of,
            self.signature.symbols,
            self._meta_of,
            lambda n: self.views.emit(self._env[n].npu),
            self._dims,
        )
        found = results.of(self.gm, items if isinstance(items, (list, tuple)) else [items])
        self.signature.results += found
        kept = [n for n in self.graph.keep_alive if n.type not in SIDE_EFFECTS]  # a pass ties those
        ge.NetOutput(results.outputs, dependencies=[n.outputs[0] for n in kept if n.outputs])
        output = self.graph.output
        assert output is not None
        for side_effect in kept:
            output.after(side_effect)


def _is_air(target: Any) -> bool:
    return isinstance(target, OpOverload) and target._schema.name in _MARKS


def _is_operator(target: Any) -> bool:
    kinds = (OpOverload, HigherOrderOperator, OpOverloadPacket)
    return isinstance(target, kinds)


def _is_empty(node: Any) -> bool:
    """Whether a node allocates memory and leaves open what is in it."""
    return isinstance(node, fx.Node) and node.target in _EMPTY


def _all_empty(meta: Any) -> bool:
    leaves = _leaves(meta)
    return bool(leaves) and all(
        isinstance(m, torch.Tensor) and all(isinstance(d, int) for d in m.shape) and 0 in m.shape
        for m in leaves
    )


def _mutates(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and schema.is_mutable


def _reads(node: fx.Node) -> set[Any]:
    """The numbers of the results of a node that are read; None among them stands for all."""
    taken = (u.args[1] if u.target is operator.getitem else None for u in node.users if u.users)
    return set(taken)


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, (list, tuple)):
        return [leaf for member in tree for leaf in _leaves(member)]
    return [] if tree is None else [tree]


def _map(fn: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, (list, tuple)):
        return [_map(fn, member) for member in tree]
    return None if tree is None else fn(tree)


def _places(tree: Any) -> int:
    """Number of results of an operator, None ones included."""
    return sum(_places(m) for m in tree) if isinstance(tree, (list, tuple)) else 1


def _fill(tree: Any, outputs: Iterator[Value]) -> Any:
    """The tree of results with values in place of what tracing saw; None stays None."""
    if isinstance(tree, (list, tuple)):
        return [_fill(member, outputs) for member in tree]
    value = next(outputs)
    return None if tree is None else value


def _symbol_of(meta: Any) -> Any:
    return from_torch(meta) if isinstance(meta, SYMBOLS) else meta


def _place(entry: Registration) -> str:
    name = getattr(entry.fn, "__qualname__", repr(entry.fn))
    return f"{name} ({entry.file}:{entry.line})" if entry.file else name
