"""``Settings``: the frozen snapshot of a configuration, in plain values, for the stages below."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, get_origin, get_type_hints

from torchair.configs.compiler_config import CompilerConfig
from torchair.configs.debug import rank_directory
from torchair.configs.options import read_path
from torchair.flags import Flags

FxPass = Callable[..., Any]
"""A user's pass, called with (gm, example_inputs, config)."""


def _text(raw: Any) -> str | None:
    return None if raw is None else str(raw)


def _number(raw: Any) -> int | None:
    return None if raw is None else int(raw)


def _on_unless_false(raw: Any) -> bool:
    return raw is None or bool(raw)


def _as_is(raw: Any) -> Any:
    return raw


def _off(raw: Any) -> bool:
    return not raw


def parse_switches(text: str | None) -> Mapping[str, bool]:
    """Read ``"PassA:on;PassB:off"`` into a mapping from the pass name to whether it runs."""
    entries = [entry.strip() for entry in (text or "").split(";")]
    return MappingProxyType(dict(_parse_switch(entry) for entry in entries if entry))


def _parse_switch(entry: str) -> tuple[str, bool]:
    name, _, state = (part.strip() for part in entry.rpartition(":"))
    if not name or state not in ("on", "off"):
        raise ValueError(
            f"optimization_switch has the entry '{entry}'; "
            "expected '<pass name>:on' or '<pass name>:off'"
        )
    return name, state == "on"


class Source(NamedTuple):
    """Where the option of a field lives, and how its raw value becomes a plain one."""

    path: str
    convert: Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the stages of the compiler read; made once, at the border, by ``Settings.of``."""

    mode: Annotated[str, Source("mode", str)]
    post_grad_custom_pre_pass: Annotated[FxPass | None, Source("post_grad_custom_pre_pass", _as_is)]
    post_grad_custom_post_pass: Annotated[
        FxPass | None, Source("post_grad_custom_post_pass", _as_is)
    ]

    graph_dump_type: Annotated[str | None, Source("debug.graph_dump.type", _text)]
    graph_dump_path: Annotated[str | None, Source("debug.graph_dump.path", _text)]
    data_dump_type: Annotated[str | None, Source("debug.data_dump.type", _text)]
    data_dump_path: Annotated[str | None, Source("debug.data_dump.path", _text)]
    data_dump_filter: Annotated[
        Callable[[Any], Any] | None, Source("debug.data_dump.filter", _as_is)
    ]
    fx_summary_type: Annotated[str | None, Source("debug.fx_summary.type", _text)]
    fx_summary_path: Annotated[str | None, Source("debug.fx_summary._path", _text)]
    fx_summary_skip_compile: Annotated[bool, Source("debug.fx_summary.skip_compile", bool)]
    report_path: Annotated[str | None, Source("debug.report.path", _text)]
    run_eagerly: Annotated[bool, Source("debug.run_eagerly", bool)]
    deadlock_check: Annotated[bool, Source("debug.deadlock_check", bool)]

    keep_inference_input_mutations: Annotated[
        bool, Source("experimental_config.keep_inference_input_mutations", bool)
    ]
    frozen_parameter: Annotated[bool, Source("experimental_config.frozen_parameter", bool)]
    static_model_ops_lower_limit: Annotated[
        int | None, Source("experimental_config.static_model_ops_lower_limit", _number)
    ]
    npu_fx_pass: Annotated[bool, Source("experimental_config.npu_fx_pass", bool)]
    aot_config_enable_joint_graph: Annotated[
        bool, Source("experimental_config.aot_config_enable_joint_graph", bool)
    ]
    aot_config_output_loss_index: Annotated[
        int, Source("experimental_config.aot_config_output_loss_index", int)
    ]
    topology_sorting_strategy: Annotated[
        str, Source("experimental_config.topology_sorting_strategy", str)
    ]
    enable_ref_data: Annotated[bool, Source("experimental_config.enable_ref_data", bool)]
    enable_view_optimize: Annotated[bool, Source("experimental_config.enable_view_optimize", bool)]
    remove_noop_ops: Annotated[bool, Source("experimental_config.remove_noop_ops", bool)]
    pattern_fusion_pass: Annotated[bool, Source("experimental_config.pattern_fusion_pass", bool)]
    strict_converters: Annotated[bool, Source("experimental_config.strict_converters", bool)]

    clone_input: Annotated[bool, Source("debug.aclgraph.clone_input", bool)]
    clone_output: Annotated[bool, Source("debug.aclgraph.enable_output_clone", bool)]
    share_results: Annotated[bool, Source("debug.aclgraph.share_results", bool)]
    capture_limit: Annotated[int, Source("debug.aclgraph.static_capture_size_limit", int)]
    capture_pool: Annotated[
        tuple[int, int] | None, Source("aclgraph_config.use_custom_pool", _as_is)
    ]
    reuse_graph_pool: Annotated[
        bool, Source("debug.aclgraph.disable_mempool_reuse_in_same_fx", _off)
    ]
    capture_error_mode: Annotated[str, Source("debug.aclgraph.capture_error_mode", str)]
    capture_fallback: Annotated[bool, Source("debug.aclgraph.capture_fallback", bool)]
    force_recapture: Annotated[bool, Source("debug.aclgraph.force_recapture", bool)]
    evict_captures: Annotated[bool, Source("debug.aclgraph.evict_captures", bool)]
    capture_warmups: Annotated[int, Source("debug.aclgraph.capture_warmups", int)]
    remove_cat_ops: Annotated[bool, Source("debug.aclgraph.remove_cat_ops", bool)]
    inplace_pass: Annotated[
        bool, Source("debug.aclgraph.disable_reinplace_inplaceable_ops_pass", _off)
    ]
    input_inplace_pass: Annotated[
        bool, Source("debug.aclgraph.disable_reinplace_input_mutated_ops_pass", _off)
    ]

    tensor_dump: Annotated[bool, Source("dump_config.enable_dump", bool)]
    tensor_dump_path: Annotated[str, Source("dump_config.dump_path", rank_directory)]
    tensor_dump_stage: Annotated[str, Source("dump_config.data_dump_stage", str)]

    enable_single_stream: Annotated[bool, Source("ge_config.enable_single_stream", bool)]
    oo_level: Annotated[str, Source("ge_config.oo_level", str)]
    oo_constant_folding: Annotated[bool, Source("ge_config.oo_constant_folding", _on_unless_false)]
    oo_dead_code_elimination: Annotated[
        bool, Source("ge_config.oo_dead_code_elimination", _on_unless_false)
    ]
    optimization_switch: Annotated[
        Mapping[str, bool], Source("ge_config.optimization_switch", parse_switches)
    ]
    fusion_switch_file: Annotated[str | None, Source("fusion_config.fusion_switch_file", _text)]
    record_modules: Annotated[
        bool, Source("export.experimental.enable_record_nn_module_stack", bool)
    ]
    export_mode: Annotated[bool, Source("export.export_mode", bool)]

    local_options: Mapping[str, Any]
    global_options: Mapping[str, Any]

    @classmethod
    def of(cls, config: CompilerConfig) -> Settings:
        """Take the snapshot; later changes of ``config`` do not reach it."""
        local_options, global_options = copy.deepcopy(config.as_dict())
        values = {
            name: source.convert(read_path(config, source.path))
            for name, source in _sources().items()
        }
        if values["oo_level"] == "O1":
            values["topology_sorting_strategy"] = "StableRDFS"  # as ge.topoSortingMode says then
        dump = Flags.read().dump
        if dump is not None:
            kind = values["graph_dump_type"] or "py"
            values |= {"graph_dump_type": kind, "graph_dump_path": dump}
        return cls(
            **values,
            local_options=MappingProxyType(local_options),
            global_options=MappingProxyType(global_options),
        )


@cache
def _sources() -> dict[str, Source]:
    hints = get_type_hints(Settings, include_extras=True)
    return {
        name: hint.__metadata__[0] for name, hint in hints.items() if get_origin(hint) is Annotated
    }
