"""Converters of the `npu` library. Importing this enters them into the table."""

from importlib import import_module

FAMILIES = ("attention", "forms", "library", "products", "quantised")

for _family in FAMILIES:
    import_module(f"{__name__}.{_family}")
