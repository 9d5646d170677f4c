"""`import npugraph_ex`: another name of the modules of `torchair.npugraph_ex`, not a copy."""

import sys

from torchair import npugraph_ex
from torchair.npugraph_ex import inference, ops, scope

sys.modules[f"{__name__}.inference"] = inference
sys.modules[f"{__name__}.ops"] = ops
sys.modules[f"{__name__}.scope"] = scope
sys.modules[__name__] = npugraph_ex
