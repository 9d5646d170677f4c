"""Writing the results of a product as they are, for kernels without an epilogue."""

from __future__ import annotations

from torchair.codegen.cpu.matmul.spec import Store
from torchair.codegen.text.writer import KernelWriter
from torchair.codegen.types import BYTES, STORAGE, Size


def plain_store(dtype: str, strides: tuple[Size, Size, Size], word: int) -> Store:
    """A store without epilogue: results are rounded to `dtype` and written to C, which has these
    strides over (batch, m, n) and its address in `word`."""

    def store(w: KernelWriter, place: tuple[str, str, str], vector: str, mask: str | None) -> None:
        index = "0"
        for position, stride in zip(place, strides, strict=True):
            index = w.add(index, w.mul(position, w.size(stride)))
        at = w.offset(w.pointer(word), STORAGE[dtype], index)
        value = vector if dtype == "f64" else _rounded(w, vector, dtype)
        if strides[2] != 1:
            _store_apart(w, dtype, value, at, w.size(strides[2]), mask)
        elif mask is None:
            w.do(f"store {w.vector(STORAGE[dtype])} {value}, ptr {at}, align {BYTES[dtype]}")
        else:
            _store_masked(w, dtype, value, at, mask)

    return store


def _rounded(w: KernelWriter, vector: str, dtype: str) -> str:
    """float32 lanes in another type, to the nearest. bf16 is rounded in integers: the
    instruction for it loses subnormal numbers."""
    kind, words, short = w.vector("float"), w.vector("i32"), w.vector("i16")
    if dtype == "f32":
        return vector
    if dtype == "f16":
        return w(f"fptrunc {kind} {vector} to {w.vector('half')}")
    bits = w(f"bitcast {kind} {vector} to {words}")
    odd = w(f"and {words} {w(f'lshr {words} {bits}, splat (i32 16)')}, splat (i32 1)")
    up = w(f"add {words} {w(f'add {words} {bits}, splat (i32 32767)')}, {odd}")
    quiet = w(f"or {words} {bits}, splat (i32 4194304)")
    nan = w(f"fcmp uno {kind} {vector}, {vector}")
    chosen = w(f"select {w.vector('i1')} {nan}, {words} {quiet}, {words} {up}")
    high = w(f"trunc {words} {w(f'lshr {words} {chosen}, splat (i32 16)')} to {short}")
    return w(f"bitcast {short} {high} to {w.vector('bfloat')}")


def _store_masked(w: KernelWriter, dtype: str, value: str, at: str, mask: str) -> None:
    vector, masks = w.vector(STORAGE[dtype]), w.vector("i1")
    name = f"llvm.masked.store.v{w.lanes}{dtype}.p0"
    w.declared[name] = f"declare void @{name}({vector}, ptr, {masks})"
    w.do(f"call void @{name}({vector} {value}, ptr align {BYTES[dtype]} {at}, {masks} {mask})")


def _store_apart(
    w: KernelWriter, dtype: str, value: str, at: str, stride: str, mask: str | None
) -> None:
    """Lane by lane, to places that are not neighbours."""
    element, masks = STORAGE[dtype], w.vector("i1")
    with w.loop("0", str(w.lanes)) as lane:
        valid = w(f"extractelement {masks} {mask}, i64 {lane.index}") if mask else "true"
        with w.when(valid):
            one = w(f"extractelement {w.vector(element)} {value}, i64 {lane.index}")
            to = w.offset(at, element, w.mul(lane.index, stride))
            w.do(f"store {element} {one}, ptr {to}, align {BYTES[dtype]}")
