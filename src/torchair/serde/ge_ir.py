"""The message classes of the wire format as attributes: `ge_ir.OpDef()`. Made when first needed.

The only module that imports protobuf, and only inside functions. The classes are made from
`ge_ir.desc`, the descriptor set of `ge_ir.proto`, and live in a private descriptor pool, so that
another package may register messages of the same names.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

_PACKAGE = "ge.proto"


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        try:
            return message(name)
        except KeyError:
            pass
    raise AttributeError(f"the wire format has no message {name!r}")


@cache
def message(name: str) -> Any:
    """The message class of that name, e.g. `message("OpDef")`."""
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.{name}"))


@cache
def dtype_numbers() -> dict[str, int]:
    """Numbers of the wire enum DataType by name."""
    enum = _pool().FindEnumTypeByName(f"{_PACKAGE}.DataType")
    return {value.name: value.number for value in enum.values}


def text_format() -> Any:
    """protobuf's text format module."""
    from google.protobuf import text_format as module

    return module


@cache
def _pool() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool

    data = resources.files(__package__).joinpath("ge_ir.desc").read_bytes()
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(data).file
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool
