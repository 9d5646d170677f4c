"""Which generator serves which request, and what may be chosen for it."""

from __future__ import annotations

from collections.abc import Callable

from torchair.codegen.cpu.attention.kernel import attention, attention_choices
from torchair.codegen.cpu.conv.kernel import conv_choices, convolution
from torchair.codegen.cpu.matmul.kernel import matmul_choices, product
from torchair.codegen.cpu.nest import loops, loops_choices
from torchair.codegen.cpu.pool import pool, pool_choices
from torchair.codegen.requests import Attention, Convolution, Loops, Pool, Product
from torchair.codegen.target import Choices, Generated

GENERATORS: dict[type, tuple[Callable[..., Generated], Callable[..., Choices]]] = {
    Loops: (loops, loops_choices),
    Product: (product, matmul_choices),
    Convolution: (convolution, conv_choices),
    Attention: (attention, attention_choices),
    Pool: (pool, pool_choices),
}
