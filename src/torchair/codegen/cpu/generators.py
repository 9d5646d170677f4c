"""Which generator serves which request, and what may be chosen for it."""

from __future__ import annotations

from collections.abc import Callable

from torchair.codegen.cpu.attention import kernel as attentions
from torchair.codegen.cpu.attention.kernel import attention
from torchair.codegen.cpu.conv import choices as conv_choices
from torchair.codegen.cpu.conv.kernel import convolution
from torchair.codegen.cpu.matmul import choices as matmul_choices
from torchair.codegen.cpu.matmul.kernel import product
from torchair.codegen.cpu.nest.kernel import loops
from torchair.codegen.cpu.pool import pool
from torchair.codegen.kernel import Generated
from torchair.codegen.requests import Attention, Convolution, Loops, Pool, Product
from torchair.codegen.ways import Choices

GENERATORS: dict[type, Callable[..., Generated]] = {
    Loops: loops,
    Product: product,
    Convolution: convolution,
    Attention: attention,
    Pool: pool,
}

CHOICES: dict[type, Callable[..., Choices]] = {
    Product: matmul_choices.choices,
    Convolution: conv_choices.choices,
    Attention: attentions.choices,
}
"""For these a generator takes a `way`."""
