"""``CompilerConfig``, the root of the configuration tree; the same options under flat names, and as
the ``CompilerConfig`` of ``npugraph_ex``; and what the engine reads back from their keys.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from torchair.configs.debug import AclgraphConfig, DebugConfig, DumpConfig, ExportConfig
from torchair.configs.engine import (
    AoeConfig,
    ExperimentalConfig,
    FusionConfig,
    GeConfig,
    InferenceConfig,
)
from torchair.configs.options import (
    ALL_MODES,
    MAX_AUTOTUNE,
    NPUGRAPH_EX,
    CallableValue,
    EngineOptions,
    OptionValue,
    Section,
    declared,
    leaves,
    read_path,
    write_path,
)
from torchair.errors import did_you_mean


class CompilerConfig(Section):
    """All options of the compiler: assigning validates, reading gives the option object."""

    public_name = "torchair.CompilerConfig"

    mode = OptionValue(MAX_AUTOTUNE, ALL_MODES).emits(modes=ALL_MODES).flat("mode", own=True)
    mode.doc("both", "works (`npugraph_ex` is `reduce-overhead` without the warnings of that name)")
    post_grad_custom_pre_pass = CallableValue(None).flat("post_grad_custom_pre_pass")
    post_grad_custom_post_pass = CallableValue(None).flat("post_grad_custom_post_pass")
    debug = DebugConfig()
    aoe_config = AoeConfig()
    export = ExportConfig()
    dump_config = DumpConfig()
    fusion_config = FusionConfig()
    experimental_config = ExperimentalConfig()
    inference_config = InferenceConfig()
    ge_config = GeConfig()
    aclgraph_config = AclgraphConfig()

    @property
    def npugraphex_config(self) -> NpugraphexConfig:
        """This config under the flat names of ``torch.compile(options=...)``."""
        return NpugraphexConfig(self)

    def as_dict(self, mode: str | None = None) -> EngineOptions:
        """Collect (local options, global options); ``mode`` defaults to the mode of this config."""
        return super().as_dict(mode or self.mode.raw)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompilerConfig) and _set_leaves(self) == _set_leaves(other)


def _set_leaves(config: CompilerConfig) -> dict[str, Any]:
    return {path: value for path, value in leaves(config) if value is not None}


OPTIONS: Mapping[str, OptionValue] = dict(declared(CompilerConfig))
"""The declaration of every option, by its path."""


def public_path(path: str) -> str:
    """The path that users know: a directory that is kept as ``_path`` is set as ``path``."""
    parent, _, name = path.rpartition(".")
    section = type(attrgetter(parent)(CompilerConfig())) if parent else CompilerConfig
    return f"{parent}.path" if name == "_path" and hasattr(section, "path") else path


def engine_keys(group: str = "") -> dict[str, str]:
    """Field and key of the options that the engine, or a ``group`` of it, reads."""
    return {
        emission.field: emission.key or option.name
        for option in OPTIONS.values()
        for emission in option.emissions
        if emission.field is not None and emission.field.rpartition(".")[0] == group
    }


def engine_values(
    local: Mapping[str, str], process: Mapping[str, str], group: str = ""
) -> dict[str, Any]:
    """What the keys of a graph and of the process say, by the fields of the engine's options."""
    found: dict[str, Any] = {}
    for option in OPTIONS.values():
        for emission in option.emissions:
            family, _, field = (emission.field or "?.").rpartition(".")
            if family == group:
                texts = local if emission.scope == "local" else process
                found[field] = emission.decode(texts.get(emission.key or option.name))
    return found


# ---- flat names


class Alias(NamedTuple):
    """The path behind a flat name; ``inverted`` when the tree holds the opposite switch."""

    path: str
    inverted: bool = False


def _aliases(own: bool) -> dict[str, Alias]:
    named = [(path, option.about.flat) for path, option in OPTIONS.items()]
    return {
        flat.name: Alias(path, flat.inverted)
        for path, flat in named
        if flat is not None and (own or not flat.own)
    }


OPTION_ALIASES: Mapping[str, Alias] = _aliases(own=False)
"""The names of ``torch.compile(options=...)`` with the backends of ``get_npu_backend``."""

FLAT_ALIASES: Mapping[str, Alias] = _aliases(own=True)
"""The names of the flat configuration of ``npugraph_ex``: all of the above and five more."""


def apply_options(
    config: Section, options: Mapping[str, Any], aliases: Mapping[str, Alias] = OPTION_ALIASES
) -> None:
    """Set flat ``options`` on ``config``; after an unknown name (``ValueError``) none is set."""
    _check_names(options, aliases)
    for name, value in options.items():
        alias = aliases[name]
        write_path(config, alias.path, _inverse(value) if alias.inverted else value)


class NpugraphexConfig:
    """The options of one config under their flat names: a view, so tree and view never disagree."""

    def __init__(self, config: Section) -> None:
        self.__dict__["_config"] = config

    def __getattr__(self, name: str) -> Any:
        if name not in OPTION_ALIASES:
            raise AttributeError(f"{type(self).__name__} has no option '{name}'")
        alias = OPTION_ALIASES[name]
        value = read_path(self.__dict__["_config"], alias.path)
        return _inverse(value) if alias.inverted else value

    def __setattr__(self, name: str, value: Any) -> None:
        apply_options(self.__dict__["_config"], {name: value})

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *OPTION_ALIASES]

    def as_dict(self) -> dict[str, Any]:
        """The current value of each flat name."""
        return {name: getattr(self, name) for name in OPTION_ALIASES}


def _check_names(options: Iterable[str], aliases: Mapping[str, Alias]) -> None:
    """Raise a ``ValueError`` that lists the legal names at the first one that is not."""
    for name in options:
        if name not in aliases:
            raise ValueError(
                f"unknown compile option '{name}'; the options are: {', '.join(sorted(aliases))}."
                f"{did_you_mean(name, aliases)}"
            )


def _inverse(value: Any) -> Any:
    # Anything but a switch stays as it is: the option rejects it and shows what the user wrote.
    return not value if isinstance(value, int) and value in (0, 1) else value


# ---- the configuration of npugraph_ex


class Switch(OptionValue):
    """A boolean option that reads back as a real ``bool``."""

    def __init__(self, default: bool) -> None:
        super().__init__(default, [True, False])

    def normalise(self, raw: Any) -> bool:
        return bool(raw)


def _flat_option(alias: Alias) -> OptionValue:
    """The option behind a flat name, as one of the flat configuration."""
    option = OPTIONS[alias.path]
    if alias.path == "mode":
        return OptionValue(NPUGRAPH_EX, [NPUGRAPH_EX])
    return Switch(option.default != alias.inverted) if option.is_switch else copy.copy(option)


class FlatConfig(
    Section, options={name: _flat_option(alias) for name, alias in FLAT_ALIASES.items()}
):
    """All options of ``npugraph_ex``: assigning validates, reading gives the option object."""

    public_name = "npugraph_ex.CompilerConfig"

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> OptionValue: ...

    def update(self, options: Mapping[str, Any]) -> None:
        """Set options by name; after an unknown name (``ValueError``) none is set."""
        _check_names(options, FLAT_ALIASES)
        for name, value in options.items():
            setattr(self, name, value)

    def tree(self) -> CompilerConfig:
        """The same options as a tree, in the mode ``npugraph_ex``."""
        config = CompilerConfig()
        given = {name: raw for name, raw in leaves(self) if raw is not None}
        apply_options(config, given, FLAT_ALIASES)
        return config

    def as_dict(self, mode: str | None = None) -> EngineOptions:
        """All values under their flat names; there are no global options."""
        return {name: option.value for name, option in vars(self).items()}, {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlatConfig) and dict(leaves(self)) == dict(leaves(other))
