"""What GE operators mean that only the `npu` library uses. Importing this fills the table."""

from importlib import import_module

FAMILIES = (
    "attention",
    "gated",
    "native",
    "products",
    "quant",
    "routing",
    "scatter",
    "forms",  # what the others leave
)

for _family in FAMILIES:
    import_module(f"{__name__}.{_family}")
