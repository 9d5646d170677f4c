"""Functions on a tape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchair.capture.base import (
    ArgumentKinds,
    CaptureOptions,
    ToCapture,
)
from torchair.capture.tape import TapeSubstrate
from torchair.capture.updates import Updates


class Captured:
    """A function captured with the arguments of its first call, called like the function."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        mutated: Sequence[int] = (),
        parameters: Sequence[int] = (),
        clone_input: bool = True,
        share_results: bool = False,
    ) -> None:
        fixed = {*mutated, *parameters}
        tensors = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
        kinds = ArgumentKinds(
            tuple(parameters), tuple(i for i in tensors if i not in fixed), tuple(mutated)
        )
        options = CaptureOptions(clone_input=clone_input, share_results=share_results)
        self.substrate = TapeSubstrate(Updates())
        self.recording = self.substrate.capture(ToCapture("g", function, args, kinds, options))

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        return self.recording.call(args, hold=True)

    @property
    def calls(self) -> list[str]:
        """Names of the recorded operators."""
        return [str(place.op) for place in self.recording._tape.places]
