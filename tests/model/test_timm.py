"""Models of timm with random weights, forward in both modes. timm is optional: `make timm`."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tolerance import assert_close_to_reference
from vision import INSTALL, MODELS, model_and_picture

pytestmark = [
    pytest.mark.timm,
    pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason=f"timm: {INSTALL}"),
]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_right_in_both_modes(name: str) -> None:
    model, picture = model_and_picture(name)
    with torch.no_grad():
        eager = model(picture)
        for backend in ("torchair", "npugraph_ex"):
            torch._dynamo.reset()
            compiled = torch.compile(model, backend=backend, dynamic=False)
            for _ in range(2):
                assert_close_to_reference(model, (picture,), compiled(picture), eager)
