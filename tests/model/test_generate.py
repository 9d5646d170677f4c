"""A slice of the matrix of `generate`; `make generate` runs all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import CompileConfig

from generate_matrix import NAMES, VOCAB, Counting, built, outcomes


def test_tokens_are_those_of_eager_and_compilations_are_few() -> None:
    found = list(outcomes("llama", 6, ("drawn",)))
    assert len(found) == 4
    assert all(o.good for o in found), "\n".join(map(str, found))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_in_every_way(name: str) -> None:
    found = list(outcomes(name, 9))
    assert len(found) == 14
    assert all(o.good for o in found), "\n".join(map(str, found))


def test_prompts_of_other_lengths_need_one_compilation_more() -> None:
    torch._dynamo.reset()
    model, counting = built("llama", num_hidden_layers=1), Counting("torchair")
    eager = model.forward
    fast, counts = torch.compile(eager, backend=counting), []
    for length in (5, 9, 7):
        prompt = torch.randint(3, VOCAB, (2, length))
        texts = []
        for model.forward in (eager, fast):
            texts.append(
                model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=4,
                    do_sample=False,
                )
            )
        assert torch.equal(*texts)
        counts.append(counting.count)
    assert counts == [3, 4, 4]


@pytest.mark.parametrize(("all_devices", "compilations"), [(True, 1), (None, 0)])
def test_generate_compiles_on_the_cpu_only_when_it_is_told_to(all_devices, compilations) -> None:
    torch._dynamo.reset()
    model, compiled = built("llama", num_hidden_layers=1), []

    def counting(module: Any, inputs: Any) -> Any:  # a function: transformers copies its config
        compiled.append(module)
        return Counting("torchair")(module, inputs)

    config = CompileConfig(backend=counting, mode="default")
    config._compile_all_devices = all_devices
    prompt = torch.randint(3, VOCAB, (2, 5))
    texts = [
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=6,
            do_sample=False,
            cache_implementation="static",
            **options,
        )
        for options in ({"disable_compile": True}, {"compile_config": config})
    ]
    assert torch.equal(*texts)
    assert len(compiled) == compilations
