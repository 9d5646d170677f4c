"""aten.mul.Tensor (mul): other bits than eager's. '/work/wt/numerics/tests/test_numerics.py', line 145, in model    return F.gelu(x) * 2"""

import torch
import torchair
from pathlib import Path

def model(arg0_1):
    gelu = torch.ops.aten.gelu.default(arg0_1)
    mul = torch.ops.aten.mul.Tensor(gelu, 2)
    return mul

inputs = torch.load(Path(__file__).with_suffix(".pt"), weights_only=True)
print(torchair.verify(model, *inputs, mode='max-autotune'))
