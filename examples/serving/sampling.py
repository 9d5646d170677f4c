"""Which token comes next: the likeliest, or one that is drawn with temperature, top-k and top-p.

Draws are counter-based: the number for a token depends on the seed and on its place in the answer
only. So a text does not depend on what is written beside it, and another replica can go on with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Sampling:
    """How tokens of a text are chosen. `top_k` of 0 and `top_p` of 1 leave all tokens."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0 or self.top_k == 1


GREEDY = Sampling(temperature=0.0)


def probabilities(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution that the next token is drawn from, in float64. Of equal scores the token
    with the lower number goes first."""
    order = torch.argsort(scores, descending=True, stable=True)
    if sampling.top_k:
        order = order[: sampling.top_k]
    likely = torch.softmax(scores[order].double() / sampling.temperature, 0)
    before = likely.cumsum(0) - likely
    likely[before >= sampling.top_p] = 0.0  # the first token stays: before it there is nothing
    found = torch.zeros(scores.shape[0], dtype=torch.float64)
    found[order] = likely / likely.sum()
    return found


def drawn(seed: int, step: int) -> float:
    """A number from 0 to 1 for a step, the same in every process."""
    bits = np.random.Philox(key=seed % 2**64, counter=step)
    return float(np.random.Generator(bits).random())


def sample(scores: torch.Tensor, sampling: Sampling, step: int) -> int:
    """One token, by the scores of all."""
    if sampling.greedy:
        return int(scores.argmax())
    reached = probabilities(scores, sampling).cumsum(0)
    wanted = drawn(sampling.seed, step) * float(reached[-1])
    return int(torch.searchsorted(reached, wanted, right=True).clamp(max=scores.shape[0] - 1))


def choose(scores: torch.Tensor, texts: Sequence[tuple[Sampling, int]]) -> list[int]:
    """The next token of each text: how it is chosen, and how many the text has had before."""
    likeliest = scores.argmax(-1).tolist()
    return [
        likeliest[row] if how.greedy else sample(scores[row], how, step)
        for row, (how, step) in enumerate(texts)
    ]
