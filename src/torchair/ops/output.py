"""What a model shows and keeps of its tensors: `npu_print` prints them where the model computes
them, in eager code and inside a graph, and `torch.ops.air.save_tensor` writes them to files.

The text of a tensor is made here, for eager execution and for the graph's StringFormat alike.
"""

from __future__ import annotations

import io
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from torchair.ops.streams import define_effect
from torchair.store import atomic_write

_PLAIN = (str, bool, float, int)


def npu_print(*args: Any, summarize_size: int = 3, tensor_detail: bool = False) -> None:
    """Print the arguments in one line, separated by blanks, when execution comes to this place.

    Tensors show their first and last `summarize_size` elements of every dim (-1: all of them),
    with `tensor_detail` their shape and type too. At least one argument must be a tensor.
    """
    _check_options(summarize_size, tensor_detail)
    placeholder = _placeholder([_word(a) for a in args if isinstance(a, _PLAIN)])
    tensors: list[torch.Tensor] = []
    parts: list[str] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            tensors.append(arg)
            parts.append(placeholder)
        elif isinstance(arg, _PLAIN):
            parts.append(_word(arg))
        else:
            raise TypeError(
                f"npu_print takes tensors, str, bool, float and int, got {type(arg).__name__}"
            )
    if not tensors:
        raise ValueError("npu_print needs at least one tensor; use print for plain values")
    torch.ops.air.print(tensors, " ".join(parts), placeholder, summarize_size, tensor_detail)


def _word(x: str | bool | float) -> str:
    """A plain argument as text. As key of a dict a symbolic number is a constant for Dynamo."""
    return str(next(iter({x: None})))


def _check_options(summarize_size: Any, tensor_detail: Any) -> None:
    if not isinstance(summarize_size, int) or isinstance(summarize_size, bool):
        raise TypeError(f"summarize_size must be int, got {type(summarize_size).__name__}")
    if summarize_size == 0 or summarize_size < -1:
        raise ValueError(
            f"summarize_size must be positive or -1 for all elements, got {summarize_size}"
        )
    if not isinstance(tensor_detail, bool):
        raise TypeError(f"tensor_detail must be bool, got {type(tensor_detail).__name__}")


def _placeholder(words: Sequence[str]) -> str:
    """What stands for a tensor in the message: something that the other words do not hold."""
    text = " ".join(words)
    placeholder = "{}"
    while placeholder in text:
        placeholder = "{" + placeholder + "}"
    return placeholder


def message(template: str, placeholder: str, texts: Sequence[str]) -> str:
    """The template with the texts in place of its placeholders, in order."""
    first, *rest = template.split(placeholder)
    if len(rest) != len(texts):
        raise ValueError(f"{template!r} has {len(rest)} places for {len(texts)} tensors")
    return first + "".join(text + part for text, part in zip(texts, rest, strict=True))


def tensor_text(tensor: torch.Tensor, size: int) -> str:
    """The elements of a tensor, at most `size` from each end of a dim; -1 means all."""
    ends, cut = tensor.detach(), []
    for dim, length in enumerate(tensor.shape):
        shortened = size != -1 and length > 2 * size
        cut.append(size if shortened else None)
        if shortened:
            last = ends.narrow(dim, length - size, size)
            ends = torch.cat([ends.narrow(dim, 0, size), last], dim)
    return _nested(ends.cpu().tolist(), cut)


def detail_text(values: str, shape: str, dtype: torch.dtype) -> str:
    """The form with shape and type, from the texts of the elements and of the dims."""
    return f"tensor({values}, shape=[{shape}], dtype={dtype})"


def _nested(values: Any, cut: Sequence[int | None]) -> str:
    if not cut:
        return _number(values)
    rows = [_nested(v, cut[1:]) for v in values]
    if cut[0] is not None:
        rows.insert(cut[0], "...")
    return "[" + (" " if len(cut) == 1 else "\n ").join(rows) + "]"


def _number(x: Any) -> str:
    if isinstance(x, complex):
        return f"{x.real:.9g}{x.imag:+.9g}j"
    return f"{x:.9g}" if isinstance(x, float) else str(int(x))


def _print(
    tensors: Sequence[torch.Tensor], template: str, placeholder: str, size: int, detail: bool
) -> None:
    texts = []
    for t in tensors:
        text = tensor_text(t, size)
        texts.append(detail_text(text, ", ".join(map(str, t.shape)), t.dtype) if detail else text)
    print(message(template, placeholder, texts))


define_effect(
    "print(Tensor[] tensors, str msg_format, str placeholder, int summarize_size, "
    "bool tensor_detail) -> ()",
    _print,
)


# ---- files ----

_numbers: defaultdict[tuple[str, int], Iterator[int]] = defaultdict(itertools.count)


def _save(x: torch.Tensor, save_path: str) -> None:
    """`<stem>_device_<index>_<n>.<suffix>`, where n counts the files of this path from 0."""
    device = x.device.index or 0
    path = Path(save_path)
    name = f"{path.stem}_device_{device}_{next(_numbers[save_path, device])}{path.suffix}"
    file = io.BytesIO()
    torch.save(x.detach().cpu().clone(), file)  # a clone, else a view brings all of its storage
    atomic_write(path.with_name(name), file.getvalue())


define_effect("save_tensor(Tensor x, str save_path) -> ()", _save)
