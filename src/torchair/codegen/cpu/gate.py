"""A native function that Python calls with the arguments of a call: are they what was expected?
Then, if a program is bound to it, it takes their addresses and runs that program, all in one."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from torchair.codegen.cpu.gate_text import ENTRY, HEAD, RECORD, Kind, gate_text
from torchair.codegen.cpu.identity import inside_of_tensors
from torchair.codegen.cpu.jit import Library
from torchair.codegen.kernel import Kernel

ANY = -1
"""A dim or a stride that is not compared."""

HITS = 0
"""Word of a table that counts the calls that passed."""

BUSY = 1
"""Word of a table: a call is running its program."""


@dataclass(frozen=True)
class TensorLike:
    """An argument that must be a plain tensor of this kind. `target` is where its address goes."""

    position: int
    sample: torch.Tensor
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    target: int = 0


@dataclass(frozen=True)
class TensorTaken:
    """An argument whose address is taken and nothing else is asked: we have made it."""

    position: int
    target: int


@dataclass(frozen=True)
class Same:
    """An argument that must be of the class of `value` and equal to it."""

    position: int
    value: Any


@dataclass(frozen=True)
class Entry:
    """What a dict must hold under a key: this object, and if it is a tensor, where it was."""

    home: dict[str, Any]
    key: str
    value: Any


@dataclass(frozen=True)
class Task:
    """A program to run: its address, the driver's, the most threads, and words that kernels set
    when they meet a bad index. `held` is a test of identity, its table and what it looks at."""

    program: int
    driver: int
    threads: int
    faults: int
    fault_count: int
    long: bool
    held: tuple[int, Any, list[Any]] | None = None


class Table(ctypes.Array):
    """The words that a gate reads. It keeps what they point to."""

    _type_ = ctypes.c_int64
    _length_ = 0


Record = TensorLike | TensorTaken | Same


def gate(
    library: Library,
    length: int,
    records: Sequence[Record],
    entries: Sequence[Entry] = (),
    task: Task | None = None,
) -> tuple[Callable[..., bool | None], Table] | None:
    """A function of `length` arguments: False if something is not as expected (or if a call of
    another thread is inside), else True; None when its program met a bad index. And its table. None
    instead where torch or Python are not as this code expects them."""
    known = _functions()
    if known is None:
        return None
    head = dict.fromkeys(HEAD, 0) | known
    words = len(HEAD)
    head["length"], head["entries"], head["records"] = length, len(entries), len(records)
    first, second = words, words + len(ENTRY) * len(entries)
    dims_at = second + len(RECORD) * len(records)
    total = dims_at + 2 * sum(len(r.dims) for r in records if isinstance(r, TensorLike))
    table: Any = type("Words", (Table,), {"_length_": total})()
    base = ctypes.addressof(table)
    head["entries.at"], head["records.at"] = base + 8 * first, base + 8 * second
    if task is not None:
        head |= {
            "program": task.program, "driver": task.driver, "threads": task.threads,
            "faults": task.faults, "fault.count": task.fault_count, "long": int(task.long),
        }  # fmt: skip
        if task.held is not None:
            test, asked, given = task.held
            head |= {"held": test, "held.table": ctypes.addressof(asked), "held.list": id(given)}
    table[0:words] = [head[name] for name in HEAD]
    table[first:second] = [w for e in entries for w in _entry_words(e)]
    for k, record in enumerate(records):
        at = second + len(RECORD) * k
        told = _record(record, known) | {"dims": base + 8 * dims_at}
        table[at : at + len(RECORD)] = [told.get(name, 0) for name in RECORD]
        if isinstance(record, TensorLike):
            both = (*record.dims, *record.strides)
            table[dims_at : dims_at + len(both)] = both
            dims_at += len(both)
    table.kept = (records, entries, task)
    return _callable(library, table), table


def _entry_words(entry: Entry) -> tuple[int, ...]:
    tensor = isinstance(entry.value, torch.Tensor)
    place = (entry.value._cdata, entry.value.data_ptr()) if tensor else (0, 0)
    return id(entry.home), id(entry.key), id(entry.value), *place


def _record(record: Record, known: dict[str, int]) -> dict[str, int]:
    """Words of a record by their names, all but those that are 0."""
    if isinstance(record, TensorTaken):
        return {"position": record.position, "kind": Kind.TAKEN, "target": record.target}
    if isinstance(record, Same):
        kind, held = Kind.EQUAL, id(record.value)
        if type(record.value) is float:
            kind, held = Kind.BITS, struct.unpack("q", struct.pack("d", record.value))[0]
        asked = {"kind": kind, "object": held, "class": id(type(record.value))}
        return {"position": record.position, **asked}
    t = record.sample
    keys = _signed(torch._C._dispatch_keys(t).raw_repr() & known["mask"] & (2**64 - 1))
    index = t.device.index if t.device.index is not None else -1
    asked = {"keys": keys, "type": _type_code(t.dtype), "index": index, "rank": t.dim()}
    return {"position": record.position, "kind": Kind.LIKE, "target": record.target, **asked}


def _callable(library: Library, table: Any) -> Callable[..., bool | None]:
    """The gate over one table as a builtin function of Python."""
    table.method = _MethodDef(b"gate", _entry(library), _FASTCALL, None)
    new = ctypes.pythonapi.PyCMethod_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p]
    return new(ctypes.addressof(table.method), table, None, None)


class _MethodDef(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_FASTCALL = 0x80  # METH_FASTCALL: an array of arguments and their number


@cache
def _entry(library: Library) -> int:
    return library.address(Kernel.of("gate", gate_text(), ()))


_SHIMS = {
    "address.of": "aoti_torch_get_data_ptr",
    "type.of": "aoti_torch_get_dtype",
    "index.of": "aoti_torch_get_device_index",
    "rank.of": "aoti_torch_get_dim",
    "sizes.of": "aoti_torch_get_sizes",
    "strides.of": "aoti_torch_get_strides",
    "count.threads": "_ZN2at15get_num_threadsEv",
}
_CORE = {
    "needs.grad": "_ZNK3c1010TensorImpl13requires_gradEv",
    "grad.mode": "_ZN3c108GradMode10is_enabledEv",
}
_PYTHON = {
    "keep": "Py_IncRef",
    "dict.get": "PyDict_GetItem",
    "equal": "PyObject_RichCompareBool",
    "save": "PyEval_SaveThread",
    "restore": "PyEval_RestoreThread",
}


@cache
def _functions() -> dict[str, int] | None:
    """Addresses of the functions that a gate calls, and where objects have what it reads. All of
    it is tried out before it is relied on."""
    inside = inside_of_tensors()
    if inside is None:
        return None
    folder = Path(torch.__file__).parent / "lib"
    found: dict[str, int] = {"inside": inside}
    try:
        for path, names in (("libtorch_cpu.so", _SHIMS), ("libc10.so", _CORE)):
            loaded = ctypes.CDLL(str(folder / path))
            found |= {name: _at(loaded[symbol]) for name, symbol in names.items()}
        found |= {name: _at(ctypes.pythonapi[symbol]) for name, symbol in _PYTHON.items()}
    except (OSError, AttributeError):
        return None
    keys = _place_of_keys()
    probe = (ctypes.c_int64 * 2)()
    if keys is None or ctypes.c_int64.from_address(id(probe) + 16).value != ctypes.addressof(probe):
        return None
    if ctypes.c_double.from_address(id(_PROBE) + 16).value != _PROBE:
        return None
    classes = {"tensor": torch.Tensor, "parameter": torch.nn.Parameter}
    singles = {"true": True, "false": False, "none": None}
    return found | keys | {name: id(value) for name, value in (classes | singles).items()}


_PROBE = 0.1


def _at(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _place_of_keys() -> dict[str, int] | None:
    """Where a tensor's implementation has its dispatch keys, in bytes, and which of them count:
    not those that tell inference tensors from others."""
    with torch.inference_mode(False):
        plain = torch.ones(2, 3)
        conjugate = torch.ones(2, dtype=torch.complex64).conj()
    with torch.inference_mode():
        inference = torch.ones(2, 3)
    places = []
    for probe in (plain, conjugate, inference):
        words = (ctypes.c_uint64 * 25).from_address(probe._cdata)
        raw = torch._C._dispatch_keys(probe).raw_repr()
        places.append({8 * k for k in range(25) if words[k] == raw})
    common = set.intersection(*places)
    if len(common) != 1:
        return None
    differ = (
        torch._C._dispatch_keys(plain).raw_repr() ^ torch._C._dispatch_keys(inference).raw_repr()
    )
    return {"keys.at": common.pop(), "mask": _signed(~differ & (2**64 - 1))}


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


@cache
def _type_code(dtype: torch.dtype) -> int:
    """Torch's own number of a type."""
    found = ctypes.c_int32()
    inside = inside_of_tensors()
    shim = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    probe = torch.empty(0, dtype=dtype)
    shim.aoti_torch_get_dtype(ctypes.c_void_p(id(probe) + (inside or 0)), ctypes.byref(found))
    return found.value
