"""FX passes of the capture mode, in order."""

from torchair.passes import Pass

CAPTURE_PASSES: tuple[Pass, ...] = ()
