"""A converter with an error, and who finds it."""

import tempfile

import torch

import torchair
from torchair import ge


@torchair.register_fx_node_ge_converter(torch.ops.aten.gelu.default)
def gelu(self, approximate="none", meta_outputs=None):
    return ge.GeluV2(self, approximate="tanh")  # whatever is asked for


def model(x, weight):
    hidden = x @ weight
    return torch.nn.functional.gelu(hidden).sum(-1)


torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    report = torchair.verify(model, torch.randn(4, 8), torch.randn(8, 16), folder=folder)
    (finding,) = report.findings
    print("right" if report else "wrong")
    print(finding.target, "by", finding.stage.value)
    print(finding.line)
    print(len(finding.script.read_text().splitlines()), "lines show it again")
