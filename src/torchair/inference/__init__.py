"""What is for inference alone: gears."""

from torchair.fx.gears import set_dim_gears

__all__ = ["set_dim_gears"]
