"""A page for a browser about all that became of a model."""

import tempfile
from html.parser import HTMLParser
from pathlib import Path

import torch

import torchair


class Sections(HTMLParser):
    """Notes the names of the parts of a page."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        if tag == "section":
            self.found.append(dict(attrs)["id"])


def model(x, weight):
    hidden = torch.nn.functional.gelu(x @ weight)
    return torch.softmax(hidden, -1)


with tempfile.TemporaryDirectory() as folder:
    config = torchair.CompilerConfig()
    config.debug.report.path = Path(folder) / "report.html"
    compiled = torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config))
    compiled(torch.randn(4, 8), torch.randn(8, 16))
    sections = Sections()
    sections.feed(Path(config.debug.report.path).read_text())
    print("report.html shows", ", ".join(s for s in sections.found if s != "passes"))
