"""A causal language model of transformers in a few compiled sizes, with a cache of rows.

Each text has a row of the cache, and a place in it. A step computes one token for the first rows,
or a piece of a prompt for the row behind them; there is a compiled step for each size."""

from __future__ import annotations

import bisect
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from torchair import CompilerConfig
from torchair.inference import cache_compile

Call = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """What is compiled: rows of a batch, lengths of pieces of a prompt; and how long a text can
    be, prompt and answer together."""

    rows: tuple[int, ...] = (1, 2, 4, 8)
    pieces: tuple[int, ...] = (16, 128)
    context: int = 512

    def __post_init__(self) -> None:
        for name, sizes in (("rows", self.rows), ("pieces", self.pieces)):
            if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
                raise ValueError(f"{name} must be rising sizes from 1 on, not {sizes}")
        if self.context % self.pieces[-1]:
            raise ValueError(
                f"the context of {self.context} tokens must be a multiple of {self.pieces[-1]}, "
                "the longest piece of a prompt"
            )


def gear(sizes: Sequence[int], wanted: int) -> int:
    """The least size that is enough."""
    return sizes[bisect.bisect_left(sizes, wanted)]


class Places:
    """Keys and values of a layer, which the model writes at given places. A place is a row of a
    table: those of the first text, then those of the second. Versions of transformers differ in
    what their base class of layers asks for; models call no more than is here."""

    is_sliding = False
    is_compileable = True

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor, rows: int
    ) -> None:
        self.keys, self.values, self.is_initialized = keys, values, True
        self._places, self._rows = places, rows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the model for new keys and values; it gets those of the whole context."""
        return self._put(self.keys, key_states), self._put(self.values, value_states)

    def _put(self, table: Any, new: torch.Tensor) -> torch.Tensor:
        _, heads, _, dim = new.shape
        table.index_copy_(0, self._places, new.transpose(1, 2).reshape(-1, heads, dim))
        return table.view(self._rows, -1, heads, dim).transpose(1, 2)

    def get_seq_length(self) -> int:
        """Unused, because the model is told positions."""
        return 0

    def get_max_cache_shape(self) -> int:
        """Places of one text."""
        return self.keys.shape[0] // self._rows

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """Unused, because the model is given a mask."""
        return self.get_max_cache_shape(), 0


class Step(nn.Module):
    """The model on some tokens of some rows."""

    def __init__(
        self, model: Any, tables: Sequence[torch.Tensor], rows: int, tokens: int, context: int
    ) -> None:
        super().__init__()
        self.model, self.rows, self.tokens, self.context = model, rows, tokens, context
        for k, table in enumerate(tables):
            self.register_buffer(f"table{k}", table, persistent=False)
        self._tables = len(tables)

    def extra_repr(self) -> str:
        """A folder of compiled methods is named after the text of a module."""
        return f"rows={self.rows}, tokens={self.tokens}, context={self.context}"

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        """Scores of the next token of each row, behind the token number `last`."""
        begins = torch.arange(self.rows).unsqueeze(1) * self.context
        places = (begins + positions).flatten()
        tables = [self.get_buffer(f"table{k}") for k in range(self._tables)]
        layers = [
            Places(k, v, places, self.rows) for k, v in zip(tables[::2], tables[1::2], strict=True)
        ]
        visible = torch.arange(self.context) <= positions[:, None, :, None]
        made = self.model(
            input_ids=tokens,
            attention_mask=visible,
            position_ids=positions,
            use_cache=True,
            past_key_values=Cache(layers=layers),
            cache_position=positions[0],
            logits_to_keep=last,
        )
        return made.logits[:, 0]


def plain(step: Step, _: Path) -> Call:
    """The step as it is."""
    return step.forward


def compiled(step: Step, folder: Path) -> Call:
    """The step compiled, with its plan in a folder that processes share."""
    return cache_compile(step.forward, dynamic=False, cache_dir=str(folder))


def packed(step: Step, folder: Path) -> Call:
    """The same with weights laid out for its kernels: faster, and a copy for each size."""
    config = CompilerConfig()
    config.experimental_config.frozen_parameter = True
    return cache_compile(step.forward, config=config, dynamic=False, cache_dir=str(folder))


WAYS: dict[str, Callable[[Step, Path], Call]] = {
    "torchair": compiled,
    "packed": packed,
    "eager": plain,
}


class Decoder:
    """All steps of one model over one cache. Rows that are in use are the first ones."""

    def __init__(self, model: Any, sizes: Sizes, way: str, folder: Path) -> None:
        config = model.config.get_text_config()
        check_attention(config, sizes.context)
        self.sizes, self.vocabulary = sizes, int(config.vocab_size)
        most, context = sizes.rows[-1], sizes.context
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dims = ((most + 1) * context, heads, dim)  # the last row is for prompts
        self._tables = [
            torch.zeros(dims, dtype=model.dtype) for _ in range(2 * config.num_hidden_layers)
        ]

        def call(first: int, rows: int, tokens: int) -> Call:
            part = slice(first * context, (first + rows) * context)
            tables = [t[part] for t in self._tables]
            return WAYS[way](Step(model, tables, rows, tokens, context).eval(), folder)

        self._rows = {n: call(0, n, 1) for n in sizes.rows}
        self._pieces = {n: call(most, 1, n) for n in sizes.pieces}

    def warm(self) -> float:
        """Run every size, so that no request waits for a compiler. Returns the seconds it took."""
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a cache that is made anew says so
            for _ in range(3):  # from the third call on a step is one native call
                for n in self.sizes.pieces:
                    self._piece([0] * n, 0)
                for n in self.sizes.rows:
                    self.decode([0] * n, [0] * n)
        return time.perf_counter() - start

    def prefill(self, prompt: Sequence[int], row: int) -> torch.Tensor:
        """Put a prompt into a row; returns the scores of the token behind it."""
        longest = self.sizes.pieces[-1]
        for begin in range(0, len(prompt), longest):
            scores = self._piece(prompt[begin : begin + longest], begin)
        self.move(self.sizes.rows[-1], row, len(prompt))
        return scores

    @torch.no_grad()
    def _piece(self, tokens: Sequence[int], begin: int) -> torch.Tensor:
        """What is padded behind the tokens is seen by none of them, and overwritten before any
        later one sees it."""
        size = gear(self.sizes.pieces, len(tokens))
        padded = torch.tensor([[*tokens, *[0] * (size - len(tokens))]])
        positions = torch.arange(begin, begin + size).unsqueeze(0)
        return self._pieces[size](padded, positions, torch.tensor([len(tokens) - 1]))[0]

    @torch.no_grad()
    def decode(self, tokens: Sequence[int], places: Sequence[int]) -> torch.Tensor:
        """Scores of the next token of each of the first rows, whose last token goes to a place.
        Rows that are padded are free ones."""
        size = gear(self.sizes.rows, len(tokens))
        pad = [0] * (size - len(tokens))
        scores = self._rows[size](
            torch.tensor([*tokens, *pad]).unsqueeze(1),
            torch.tensor([*places, *pad]).unsqueeze(1),
            torch.tensor([0]),
        )
        return scores[: len(tokens)]

    @torch.no_grad()
    def move(self, source: int, target: int, length: int) -> None:
        """Copy what a text has in its row to another row."""
        if source == target:
            return
        here, there = source * self.sizes.context, target * self.sizes.context
        for table in self._tables:
            table[there : there + length] = table[here : here + length]


def check_attention(config: Any, context: int) -> None:
    """Raise for a model whose layers do not see the whole text."""
    window = getattr(config, "sliding_window", None)
    narrow = window is not None and window < context
    kinds = set(getattr(config, "layer_types", None) or (["sliding_attention"] if narrow else []))
    kinds -= {"full_attention"} if narrow else {"full_attention", "sliding_attention"}
    if kinds:
        raise ValueError(
            f"the model {config.model_type} has layers of {sorted(kinds)}, which do not see all of "
            f"a text of {context} tokens; this server keeps a cache for those that do"
        )
