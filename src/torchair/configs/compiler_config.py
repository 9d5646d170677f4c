"""``CompilerConfig``, the root of the configuration tree; the same options under flat names, and as
the ``CompilerConfig`` of ``npugraph_ex``; and what the engine reads back from their keys.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from torchair.configs import debug_sections, sections
from torchair.configs.options import (
    ALL_MODES,
    CAPTURE_MODES,
    MAX_AUTOTUNE,
    NPUGRAPH_EX,
    REDUCE_OVERHEAD,
    About,
    Alias,
    CallableValue,
    Numerics,
    OptionMaps,
    OptionValue,
    Section,
    declared,
    leaves,
    read_path,
    write_path,
)
from torchair.errors import did_you_mean
from torchair.flags import Flags
from torchair.log import warn_once


def _unless_default(raw: str) -> str | None:
    return None if raw == "default" else raw


class CompilerConfig(Section):
    """All options of the compiler: assigning validates, reading gives the option object."""

    public_name = "torchair.CompilerConfig"

    mode = OptionValue(MAX_AUTOTUNE, ALL_MODES).emits(modes=ALL_MODES).flat("mode", own=True)
    mode.doc("both", "works (`npugraph_ex` is `reduce-overhead` without the warnings of that name)")
    numerics = (
        OptionValue("default", get_args(Numerics))
        .emits("torchair.numerics", encode=_unless_default, field="numerics")
        .flat("numerics")
        .doc(
            "both",
            "works (ours, not of the original): `strict` gives eager's bits on a CPU, "
            "`batch_invariant` results of a row that do not depend on the batch, see "
            "[numerics.md](numerics.md)",
        )
    )
    post_grad_custom_pre_pass = CallableValue(None).flat("post_grad_custom_pre_pass")
    post_grad_custom_post_pass = CallableValue(None).flat("post_grad_custom_post_pass")
    debug = debug_sections.DebugConfig()
    aoe_config = sections.AoeConfig()
    export = debug_sections.ExportConfig()
    dump_config = debug_sections.DumpConfig()
    fusion_config = sections.FusionConfig()
    experimental_config = sections.ExperimentalConfig()
    inference_config = sections.InferenceConfig()
    ge_config = sections.GeConfig()
    aclgraph_config = sections.AclgraphConfig()

    @property
    def npugraphex_config(self) -> NpugraphexConfig:
        """This config under the flat names of ``torch.compile(options=...)``."""
        return NpugraphexConfig(self)

    def as_dict(self, mode: str | None = None) -> OptionMaps:
        """Collect (local options, global options); ``mode`` defaults to the mode of this config."""
        return super().as_dict(mode or self.mode.raw)


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
                decode = emission.decode or option.read
                found[field] = decode(texts.get(emission.key or option.name))
    return found


# ---- flat names


def _aliases(own: bool) -> dict[str, Alias]:
    named = [(path, option.about.flat) for path, option in OPTIONS.items()]
    return {
        flat.name: flat._replace(path=path)
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

    def as_dict(self, mode: str | None = None) -> OptionMaps:
        """All values under their flat names; there are no global options."""
        return {name: option.value for name, option in vars(self).items()}, {}


# ---- what the compiler takes from it: `Settings`, a frozen snapshot in plain values ----


FxPass = Callable[..., Any]
"""A user's pass, called with (gm, example_inputs, config)."""


class OptionSource(NamedTuple):
    """Where the option of a field lives, and how its raw value becomes a plain one."""

    path: str
    convert: Callable[[Any], Any]


def _at(path: str, convert: Callable[[Any], Any] | None = None) -> Any:
    """A field that is read from an option, whose default stands where that is declared."""
    source = OptionSource(path, convert or OPTIONS[path].plain)
    default = source.convert(OPTIONS[path].default)
    return dataclasses.field(default=default, metadata={"source": source})


def _sources(kind: type) -> dict[str, OptionSource]:
    fields = dataclasses.fields(kind)
    return {f.name: f.metadata["source"] for f in fields if "source" in f.metadata}


def _off(raw: Any) -> bool:
    return not raw


@dataclass(frozen=True)
class CaptureOptions:
    """What the user chose of capture, in plain values."""

    clone_input: bool = _at("debug.aclgraph.clone_input")
    clone_output: bool = _at("debug.aclgraph.enable_output_clone")
    share_results: bool = _at("debug.aclgraph.share_results")  # overwritten by replays
    frozen_parameter: bool = _at("experimental_config.frozen_parameter")
    reuse: bool = _at("debug.aclgraph.disable_mempool_reuse_in_same_fx", _off)  # keys share memory
    limit: int = _at("debug.aclgraph.static_capture_size_limit")
    evict: bool = _at("debug.aclgraph.evict_captures")  # at the limit the key used least recently
    pool: tuple[int, int] | None = _at("aclgraph_config.use_custom_pool")
    error_mode: str = _at("debug.aclgraph.capture_error_mode")
    fallback: bool = _at("debug.aclgraph.capture_fallback")  # instead of an error
    warmups: int = _at("debug.aclgraph.capture_warmups")
    force_recapture: bool = _at("debug.aclgraph.force_recapture")

    @classmethod
    def read(cls, texts: Mapping[str, Any]) -> CaptureOptions:
        """From the texts that a generated program holds, by the names of options."""
        found = {}
        for name, source in _sources(cls).items():
            text = texts.get(source.path.rpartition(".")[2])
            if text is not None:
                found[name] = source.convert(OPTIONS[source.path].read(str(text).lower()))
        return cls(**found).resolved()

    @staticmethod
    def names() -> set[str]:
        """The names of these options in the configuration."""
        return {source.path.rpartition(".")[2] for source in _sources(CaptureOptions).values()}

    def resolved(self, fresh_results: bool = False) -> CaptureOptions:
        """With what follows: results that are copied, or are to be fresh, are not shared, and a
        pool of the user's is never shared by keys."""
        share = self.share_results and not self.clone_output and not fresh_results
        reuse = self.reuse and self.pool is None
        return dataclasses.replace(self, share_results=share, reuse=reuse)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the stages of the compiler read; made once, at the border, by ``Settings.of``."""

    mode: str = _at("mode")
    post_grad_custom_pre_pass: FxPass | None = _at("post_grad_custom_pre_pass")  # noqa: RUF009
    post_grad_custom_post_pass: FxPass | None = _at("post_grad_custom_post_pass")  # noqa: RUF009

    numerics: Numerics = _at("numerics")  # noqa: RUF009

    graph_dump_type: str | None = _at("debug.graph_dump.type")
    graph_dump_path: str | None = _at("debug.graph_dump._path")
    data_dump_type: str | None = _at("debug.data_dump.type")
    data_dump_path: str | None = _at("debug.data_dump._path")
    data_dump_filter: Callable[[Any], Any] | None = _at("debug.data_dump.filter")  # noqa: RUF009
    fx_summary_type: str | None = _at("debug.fx_summary.type")
    fx_summary_path: str = _at("debug.fx_summary._path", str)
    fx_summary_skip_compile: bool = _at("debug.fx_summary.skip_compile")
    report_path: str | None = _at("debug.report._path")
    run_eagerly: bool = _at("debug.run_eagerly")
    strict: bool = _at("debug.strict")  # fallbacks are errors
    deadlock_check: bool = _at("debug.deadlock_check")

    frozen_parameter: bool = _at("experimental_config.frozen_parameter")
    enable_view_optimize: bool = _at("experimental_config.enable_view_optimize")
    remove_noop_ops: bool = _at("experimental_config.remove_noop_ops")
    pattern_fusion_pass: bool = _at("experimental_config.pattern_fusion_pass")
    strict_converters: bool = _at("experimental_config.strict_converters")
    record_modules: bool = _at("export.experimental.enable_record_nn_module_stack")

    capture: CaptureOptions
    remove_cat_ops: bool = _at("debug.aclgraph.remove_cat_ops")
    inplace_pass: bool = _at("debug.aclgraph.disable_reinplace_inplaceable_ops_pass", _off)
    input_inplace_pass: bool = _at("debug.aclgraph.disable_reinplace_input_mutated_ops_pass", _off)

    tensor_dump: bool = _at("dump_config.enable_dump")
    tensor_dump_path: str = _at("dump_config.dump_path", debug_sections.rank_directory)
    tensor_dump_stage: str = _at("dump_config.data_dump_stage")

    local_options: Mapping[str, Any]
    global_options: Mapping[str, Any]

    @property
    def dumps_tensors(self) -> bool:
        """Whether the user asks for tensors of graphs that would be captured."""
        return self.tensor_dump and self.mode in CAPTURE_MODES

    @property
    def dumps_instead(self) -> bool:
        """Whether the user asks for data of the traced graph, which then runs uncompiled."""
        traced = self.run_eagerly or self.tensor_dump_stage == "original"
        return self.data_dump_type is not None or (self.dumps_tensors and traced)

    @classmethod
    def of(cls, config: CompilerConfig) -> Settings:
        """Take the snapshot; later changes of ``config`` do not reach it."""
        local_options, global_options = copy.deepcopy(config.as_dict())
        values, capture = (
            {name: s.convert(read_path(config, s.path)) for name, s in _sources(kind).items()}
            for kind in (cls, CaptureOptions)
        )
        dump = Flags.read().dump
        if dump is not None:
            kind = values["graph_dump_type"] or "py"
            values |= {"graph_dump_type": kind, "graph_dump_path": dump}
        return cls(
            **values,
            capture=CaptureOptions(**capture),
            local_options=MappingProxyType(local_options),
            global_options=MappingProxyType(global_options),
        )


def parse_switches(text: str | None) -> dict[str, bool]:
    """Read ``"PassA:on;PassB:off"`` into a mapping from the pass name to whether it runs."""
    switches = {}
    for entry in filter(None, map(str.strip, (text or "").split(";"))):
        name, _, state = (part.strip() for part in entry.rpartition(":"))
        if not name or state not in ("on", "off"):
            raise ValueError(
                f"optimization_switch has the entry '{entry}'; "
                "expected '<pass name>:on' or '<pass name>:off'"
            )
        switches[name] = state == "on"
    return switches


# ---- warnings


def warn_about(config: Section) -> None:
    """Tell what a configuration asks for in vain."""
    for warn in (warn_ineffective, warn_unsupported, warn_frozen_parameter):
        warn(config)


_FEATURES_WITHOUT_EFFECT = {
    REDUCE_OVERHEAD: ("set_dim_gears", "dynamo_export", "scope", "npu_print")
}


def ineffective_options(config: Section) -> list[str]:
    """The set options that the mode of ``config`` does not honour, as ``config.<path>:<value>``."""
    mode = read_path(config, "mode")
    found = []
    for path, value in leaves(config):
        about = OPTIONS[path].about if path in OPTIONS else About()
        other = MAX_AUTOTUNE if about.where == "capture" else REDUCE_OVERHEAD
        values = about.ineffective
        warned = mode == other and values is not None and (not values or value in values)
        if value is not None and warned:
            found.append(f"config.{path}:{value}")
    return found


def warn_ineffective(config: Section) -> None:
    """Issue one ``UserWarning`` for all ineffective options; deprecate reduce-overhead."""
    mode = read_path(config, "mode")
    if found := ineffective_options(config):
        listed = ", ".join([*found, *_FEATURES_WITHOUT_EFFECT.get(mode, ())])
        text = f"config may not take effect or report error in {mode} mode: {listed}"
        warn_once(text, stacklevel=3)
    if mode == REDUCE_OVERHEAD:
        text = "mode 'reduce-overhead' is deprecated; use the 'npugraph_ex' backend instead"
        warn_once(text, DeprecationWarning, stacklevel=3)


def warn_unsupported(config: Section, names: Mapping[str, str] | None = None) -> None:
    """Issue one ``UserWarning`` for all options that are set and do nothing.

    ``names`` gives the name under which the user knows the option at a path.
    """
    mode, known = read_path(config, "mode"), names or {}
    exports = bool(read_path(config, "export.export_mode"))
    warned = {text.partition(":")[0] for text in ineffective_options(config)}
    defaults = dict(leaves(type(config)()))
    found = [
        f"config.{known.get(path, path)}: {why}"
        for path, value in leaves(config)
        if value != defaults.get(path)
        and f"config.{path}" not in warned
        and path in OPTIONS
        and (why := why_idle(OPTIONS[path].about, mode)) is not None
        and not (exports and OPTIONS[path].about.exports)
    ]
    if found:
        text = f"no effect on this device: {'; '.join(found)} (leave it out)"
        warn_once(text, stacklevel=3)


def why_idle(about: About, mode: str) -> str | None:
    """Why an option does nothing in a mode; None if it does something."""
    captures = mode in CAPTURE_MODES
    if about.idle is not None or about.where == "both" or (about.where == "capture") == captures:
        return about.idle
    usual = "it is for the mode max-autotune" if captures else "it is for the modes that capture"
    return about.elsewhere or usual


def warn_frozen_parameter(config: Section) -> None:
    """Remind the user, once ``frozen_parameter`` is on, of the promise that comes with it."""
    if read_path(config, "experimental_config.frozen_parameter"):
        warn_once(
            "frozen_parameter is on: parameters should keep their address and contents as long as "
            "the compiled model is used. Each change repacks them; turn the option off if they "
            "change often",
            stacklevel=3,
        )
