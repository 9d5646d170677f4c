"""The message classes of the wire format as attributes: `ge_ir.OpDef()`."""

from typing import Any

from torchair.serde import schema


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        try:
            return schema.message(name)
        except KeyError:
            pass
    raise AttributeError(f"the wire format has no message {name!r}")
