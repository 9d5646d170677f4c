"""Tables of models, one module for each library: `MODELS`, a name -> `Entry`."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator

from .entry import Entry

LIBRARIES = {
    "diffusers": "diffusion",
    "torch-geometric": "graphs",
    "e3nn": "equivariant",
    "monai": "medical",
    "kornia": "geometry",
    "transformers": "hugging_face",
    "timm": "pictures",
    "recommenders": "recommenders",
    "physics": "physics",
}
"""The name of a library -> the module with its models."""


def entries(library: str) -> dict[str, Entry]:
    """The models of a library; ImportError where it is not installed."""
    module = importlib.import_module(f"{__name__}.{LIBRARIES[library]}")
    return dict(module.MODELS)


def names(pattern: str) -> Iterator[str]:
    """`library/model` of all models that a regular expression is found in."""
    wanted = re.compile(pattern)
    for library in LIBRARIES:
        yield from (
            name for model in entries(library) if wanted.search(name := f"{library}/{model}")
        )


def entry(name: str) -> Entry:
    """The model of a name as `names` gives them."""
    library, model = name.split("/")
    return entries(library)[model]
