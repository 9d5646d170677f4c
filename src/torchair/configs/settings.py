"""What the compiler takes from a configuration: ``Settings``, a frozen snapshot in plain values;
and the warnings about options that do nothing, and about promises the user makes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from torchair.configs.compiler_config import OPTIONS, CompilerConfig
from torchair.configs.debug import rank_directory
from torchair.configs.options import (
    CAPTURE_MODES,
    MAX_AUTOTUNE,
    REDUCE_OVERHEAD,
    About,
    Section,
    leaves,
    read_path,
)
from torchair.flags import Flags
from torchair.log import warn_once

FxPass = Callable[..., Any]
"""A user's pass, called with (gm, example_inputs, config)."""


class Source(NamedTuple):
    """Where the option of a field lives, and how its raw value becomes a plain one."""

    path: str
    convert: Callable[[Any], Any]


def _at(path: str, convert: Callable[[Any], Any] | None = None) -> Any:
    """A field that is read from an option."""
    source = Source(path, convert or OPTIONS[path].plain)
    return dataclasses.field(metadata={"source": source})


def _off(raw: Any) -> bool:
    return not raw


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the stages of the compiler read; made once, at the border, by ``Settings.of``."""

    mode: str = _at("mode")
    post_grad_custom_pre_pass: FxPass | None = _at("post_grad_custom_pre_pass")  # noqa: RUF009
    post_grad_custom_post_pass: FxPass | None = _at("post_grad_custom_post_pass")  # noqa: RUF009

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

    frozen_parameter: bool = _at("experimental_config.frozen_parameter")
    enable_view_optimize: bool = _at("experimental_config.enable_view_optimize")
    remove_noop_ops: bool = _at("experimental_config.remove_noop_ops")
    pattern_fusion_pass: bool = _at("experimental_config.pattern_fusion_pass")
    strict_converters: bool = _at("experimental_config.strict_converters")
    record_modules: bool = _at("export.experimental.enable_record_nn_module_stack")

    clone_input: bool = _at("debug.aclgraph.clone_input")
    clone_output: bool = _at("debug.aclgraph.enable_output_clone")
    share_results: bool = _at("debug.aclgraph.share_results")
    capture_limit: int = _at("debug.aclgraph.static_capture_size_limit")
    capture_pool: tuple[int, int] | None = _at("aclgraph_config.use_custom_pool")
    reuse_graph_pool: bool = _at("debug.aclgraph.disable_mempool_reuse_in_same_fx", _off)
    capture_error_mode: str = _at("debug.aclgraph.capture_error_mode")
    capture_fallback: bool = _at("debug.aclgraph.capture_fallback")
    force_recapture: bool = _at("debug.aclgraph.force_recapture")
    evict_captures: bool = _at("debug.aclgraph.evict_captures")
    capture_warmups: int = _at("debug.aclgraph.capture_warmups")
    remove_cat_ops: bool = _at("debug.aclgraph.remove_cat_ops")
    inplace_pass: bool = _at("debug.aclgraph.disable_reinplace_inplaceable_ops_pass", _off)
    input_inplace_pass: bool = _at("debug.aclgraph.disable_reinplace_input_mutated_ops_pass", _off)

    tensor_dump: bool = _at("dump_config.enable_dump")
    tensor_dump_path: str = _at("dump_config.dump_path", rank_directory)
    tensor_dump_stage: str = _at("dump_config.data_dump_stage")

    local_options: Mapping[str, Any]
    global_options: Mapping[str, Any]

    @classmethod
    def of(cls, config: CompilerConfig) -> Settings:
        """Take the snapshot; later changes of ``config`` do not reach it."""
        local_options, global_options = copy.deepcopy(config.as_dict())
        sources = {f.name: f.metadata["source"] for f in dataclasses.fields(cls) if f.metadata}
        values = {name: s.convert(read_path(config, s.path)) for name, s in sources.items()}
        dump = Flags.read().dump
        if dump is not None:
            kind = values["graph_dump_type"] or "py"
            values |= {"graph_dump_type": kind, "graph_dump_path": dump}
        return cls(
            **values,
            local_options=MappingProxyType(local_options),
            global_options=MappingProxyType(global_options),
        )


def parse_switches(text: str | None) -> dict[str, bool]:
    """Read ``"PassA:on;PassB:off"`` into a mapping from the pass name to whether it runs."""
    entries = [entry.strip() for entry in (text or "").split(";")]
    return dict(_parse_switch(entry) for entry in entries if entry)


def _parse_switch(entry: str) -> tuple[str, bool]:
    name, _, state = (part.strip() for part in entry.rpartition(":"))
    if not name or state not in ("on", "off"):
        raise ValueError(
            f"optimization_switch has the entry '{entry}'; "
            "expected '<pass name>:on' or '<pass name>:off'"
        )
    return name, state == "on"


# ---- warnings

_FEATURES_WITHOUT_EFFECT = {
    REDUCE_OVERHEAD: ("set_dim_gears", "dynamo_export", "scope", "npu_print"),
}


def ineffective_options(config: Section) -> list[str]:
    """The set options that the mode of ``config`` does not honour, as ``config.<path>:<value>``."""
    mode = read_path(config, "mode")
    return [
        f"config.{path}:{value}"
        for path, value in leaves(config)
        if value is not None
        and path in OPTIONS
        and _is_ineffective(OPTIONS[path].about, mode, value)
    ]


def _is_ineffective(about: About, mode: str, value: Any) -> bool:
    other = MAX_AUTOTUNE if about.where == "capture" else REDUCE_OVERHEAD
    values = about.ineffective
    return mode == other and values is not None and (not values or value in values)


def warn_ineffective(config: Section) -> None:
    """Issue one ``UserWarning`` for all ineffective options; deprecate reduce-overhead."""
    mode = read_path(config, "mode")
    if found := ineffective_options(config):
        listed = ", ".join([*found, *_FEATURES_WITHOUT_EFFECT.get(mode, ())])
        warn_once(
            f"config may not take effect or report error in {mode} mode: {listed}",
            UserWarning,
            stacklevel=3,
        )
    if mode == REDUCE_OVERHEAD:
        warn_once(
            "mode 'reduce-overhead' is deprecated; use the 'npugraph_ex' backend instead",
            DeprecationWarning,
            stacklevel=3,
        )


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
        listed = "; ".join(found)
        warn_once(f"no effect on this device: {listed} (leave it out)", UserWarning, stacklevel=3)


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
            "frozen_parameter is on: parameters should keep their address and contents for as long "
            "as the compiled model is used; each change costs time, so switch it off where they "
            "change often",
            UserWarning,
            stacklevel=3,
        )
