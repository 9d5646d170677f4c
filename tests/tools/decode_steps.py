"""Runs the decode steps of examples/ascend in all modes, and leaves a timeline of each graph in the
working directory. Two steps of different streams go on only when both have begun, so a graph whose
streams cannot overlap never ends. No plan copies a cache.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

import torch

from lane_tools import Meeting
from torchair import emulate
from torchair.engine.inspect.timeline import Timeline

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "ascend"
MET = {
    "qwen3_moe": ("MoeGatingTopKSoftmaxV2", "DynamicQuant"),
    "deepseek_mla": ("SwiGlu", "GroupedMatmul"),
}


class Watched(Meeting):
    """Steps that meet, with a timeline around them."""

    def begin(self):
        self.recorder.begin()

    def end(self):
        self.recorder.end()

    def wrap(self, run, steps, lane):
        return self.recorder.wrap(super().wrap(run, steps, lane), steps, lane)


def main() -> None:
    torch.set_num_threads(2)
    emulate.install()
    sys.path.insert(0, str(EXAMPLES))
    recorder = Timeline.recorder
    for name, types in MET.items():

        def watched(timeline, plan, types=types):
            assert not plan.write_backs, "a cache is copied"
            copied = [step.args[0] for step in plan.steps if step.kind == "copy"]
            kinds = {plan.place(slot)[0].kind for slot in copied}
            assert not kinds & {"input", "tied"}, "a cache is copied"
            made = Watched(*types)
            made.recorder = recorder(timeline, plan)
            return made(plan)

        Timeline.recorder = watched
        import_module(name).main("all")


if __name__ == "__main__":
    os.environ["TORCHAIR_TIMELINE"] = os.getcwd()
    main()
