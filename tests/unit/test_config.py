"""Tests of the configuration room: values, tree, engine keys, aliases, warnings, snapshot, docs."""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import pickle
import sys
import threading
import time
import warnings
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from torchair import log
from torchair.configs import compiler_config
from torchair.configs.compiler_config import (
    OPTION_ALIASES,
    OPTIONS,
    CaptureOptions,
    CompilerConfig,
    FlatConfig,
    Settings,
    apply_options,
    engine_keys,
    parse_switches,
    public_path,
    warn_frozen_parameter,
    warn_ineffective,
    warn_unsupported,
)
from torchair.configs.debug_sections import rank_directory
from torchair.configs.options import (
    ALL_MODES,
    CAPTURE_MODES,
    CallableValue,
    DeprecatedValue,
    DictOptionValue,
    FileValue,
    IntListValue,
    IntRangeValue,
    MustExistedFileAddr,
    MustExistedPathValue,
    OptionValue,
    RawValue,
    RegexValue,
    Section,
    StrOptionValue,
    flag,
    given,
    leaves,
    read_path,
    write_path,
)

CODE_LINE = "ERR03005 GRAPH internal error"
EFFECTS = ("works", "for `dynamo_export`", "no effect on this device: ")


@pytest.fixture
def config() -> CompilerConfig:
    return CompilerConfig()


# ---- value classes --------------------------------------------------------------------------


def accepted_cases(tmp_path: Path) -> list[tuple[OptionValue, Any, Any]]:
    text, table = tmp_path / "a.txt", tmp_path / "a.json"
    text.write_text("x")
    table.write_text("{}")
    return [
        (OptionValue("a", ["a", "b"]), "b", "b"),
        (OptionValue("a", ("a", "b")), "b", "b"),
        (OptionValue(None), object, str(object)),
        (OptionValue(None), 7, "7"),
        (OptionValue(None), "True", "1"),
        (flag(False), True, "1"),
        (flag(True), False, "0"),
        (flag(False), 1, "1"),
        (flag(True), 0, "0"),
        (flag(None, or_none=True), None, None),
        (IntRangeValue(None, -1, 5), -1, "-1"),
        (IntRangeValue(None, -1, 5), 5, "5"),
        (IntRangeValue(3, 0, 5), True, "1"),
        (IntListValue(None), None, []),
        (IntListValue(None), [1, 2], [1, 2]),
        (IntListValue(None), (1, 2), (1, 2)),
        (StrOptionValue(None), "x", "x"),
        (StrOptionValue("x"), None, None),
        (DictOptionValue(None), {"a": 1}, {"a": 1}),
        (DictOptionValue({}), None, None),
        (FileValue(None), str(text), str(text)),
        (FileValue("x"), None, None),
        (MustExistedPathValue("./"), str(tmp_path), str(tmp_path)),
        (MustExistedFileAddr(None), str(table), str(table)),
        (MustExistedFileAddr("x"), None, None),
        (RegexValue("", "^a*$", "letters a"), "aaa", "aaa"),
        (CallableValue(None), len, len),
        (CallableValue(len), None, None),
        (RawValue(None), 5, 5),
    ]


def rejected_cases(tmp_path: Path) -> list[tuple[OptionValue, Any, type[Exception]]]:
    text = tmp_path / "a.txt"
    text.write_text("x")
    missing = str(tmp_path / "missing")
    return [
        (OptionValue("a", ["a", "b"]), "c", ValueError),
        (flag(False), "True", ValueError),
        (flag(False), None, ValueError),
        (flag(False), 2, ValueError),
        (IntRangeValue(3, 1, 5), 0, ValueError),
        (IntRangeValue(3, 1, 5), 6, ValueError),
        (IntRangeValue(3, 1, 5), "3", ValueError),
        (IntRangeValue(3, 1, 5), 3.0, ValueError),
        (IntRangeValue(3, 1, 5), None, ValueError),
        (IntListValue(None), 1, TypeError),
        (IntListValue(None), ["1"], TypeError),
        (IntListValue(None), {1}, TypeError),
        (StrOptionValue(None), 1, TypeError),
        (DictOptionValue(None), [], TypeError),
        (FileValue(None), missing, FileNotFoundError),
        (FileValue(None), str(tmp_path), FileNotFoundError),
        (FileValue(None), "", FileNotFoundError),
        (FileValue(None), 0, FileNotFoundError),
        (MustExistedPathValue("./"), None, FileNotFoundError),
        (MustExistedPathValue("./"), missing, FileNotFoundError),
        (MustExistedPathValue("./"), str(text), FileNotFoundError),
        (MustExistedFileAddr(None), "", ValueError),
        (MustExistedFileAddr(None), str(text), FileNotFoundError),
        (MustExistedFileAddr(None), missing + ".json", FileNotFoundError),
        (MustExistedFileAddr(None), 1, FileNotFoundError),
        (RegexValue("", "^a*$", "letters a"), "ab", ValueError),
        (RegexValue("", "^a*$", "letters a"), 1, TypeError),
        (RegexValue("", "^a*$", "letters a"), None, TypeError),
        (CallableValue(None), "len", TypeError),
    ]


def test_values_accept_and_normalise(tmp_path: Path) -> None:
    for option, value, shown in accepted_cases(tmp_path):
        option.value = value
        assert option.value == shown, (option, value)
        assert type(option.value) is type(shown), (option, value)


def test_values_reject_and_keep_the_old_value(tmp_path: Path) -> None:
    for option, value, error in rejected_cases(tmp_path):
        with pytest.raises(error) as caught:
            option.value = value
        assert type(caught.value) is error, (option, value)
        assert option.raw == option.default, (option, value)


def test_rejection_names_option_value_type_and_choice(config: CompilerConfig) -> None:
    with pytest.raises(ValueError) as caught:
        config.debug.run_eagerly = "yes"
    text = str(caught.value)
    for part in ("run_eagerly", "'yes'", "str", "[True, False]"):
        assert part in text
    assert "Traceback" not in text and CODE_LINE not in text


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        (
            OptionValue("a", ["a", "b"]),
            "c",
            "Value 'c' (type: <class 'str'>) not in optional list ['a', 'b'] (type: <class "
            "'str'>).",
        ),
        (IntRangeValue(3, -1, 5), "-1", "Please set integer type, but got <class 'str'>"),
        (IntRangeValue(3, -1, 5), -2, "Please set value in [-1, 5], -2 is out of range."),
        (
            FileValue(None),
            "./x*",
            "Please set legal file path, ./x* is not found or is not a file!",
        ),
        (
            MustExistedPathValue("./"),
            "./x*",
            "Please set legal dir path, ./x* is not found or is not a file directory!",
        ),
        (
            MustExistedFileAddr(None),
            "./x*",
            "Please set legal file path, ./x* is not found or is not '.json' file!",
        ),
        (MustExistedFileAddr(None), "", "File path cannot be empty!"),
        (StrOptionValue(None), 1, "value must be str or None, got <class 'int'>"),
        (CallableValue(None), 1, "value must be Callable or None, got <class 'int'>"),
        (IntListValue(None), 1, "the set value must be None or list, got <class 'int'>"),
    ],
)
def test_rejection_begins_with_the_original_sentence(
    option: OptionValue, value: Any, sentence: str
) -> None:
    with pytest.raises((ValueError, TypeError, FileNotFoundError)) as caught:
        option.value = value
    assert str(caught.value).startswith(f"{sentence}\noption '")


def test_typos_are_told_what_was_meant(config: CompilerConfig) -> None:
    with pytest.raises(ValueError, match=r"has no option mod, all options .* Did you mean 'mode'"):
        config.mod = "x"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="Did you mean 'max-autotune'"):
        config.mode = "max_autotune"
    with pytest.raises(ValueError, match="Did you mean 'clone_output'"):
        apply_options(config, {"clone_outpt": True})


def test_what_is_no_configuration(config: CompilerConfig) -> None:
    assert given(config, CompilerConfig) is config
    assert given(None, CompilerConfig) == config
    for wrong, text in (
        (CompilerConfig, r"is the class CompilerConfig: pass one made of it, CompilerConfig\(\)"),
        ({"mode": "reduce-overhead"}, r"is a dict: make a CompilerConfig\(\)"),
        (FlatConfig(), r"is a npugraph_ex\.CompilerConfig, .* takes a torchair\.CompilerConfig"),
        (3, r"is a int, which is not for this backend"),
    ):
        with pytest.raises(TypeError, match=text):
            given(wrong, CompilerConfig)


def test_truth_default_and_optional() -> None:
    option = flag(False)
    assert not option
    option.value = 1
    assert option
    assert option.default is False
    assert option.optional == [True, False]
    assert OptionValue("0").raw == "0" and bool(OptionValue("0"))


def test_callable_option_returns_the_very_object() -> None:
    option = CallableValue(None)
    option.value = rejected_cases
    assert option.value is rejected_cases


def test_defaults_are_not_validated() -> None:
    assert flag(None).value is None
    assert MustExistedPathValue("/no/such/directory").value == "/no/such/directory"


def test_deprecated_value_names_its_replacement(capsys: pytest.CaptureFixture[str]) -> None:
    class Old(Section):
        renamed = DeprecatedValue([True, False], replacement="better")
        dropped = DeprecatedValue()

    section = Old()
    assert section.as_dict() == ({}, {})
    assert capsys.readouterr().err == ""
    section.renamed = True
    section.dropped = 1
    section.as_dict()
    first, second = capsys.readouterr().err.splitlines()
    assert "renamed" in first and "better" in first
    assert "dropped" in second and "no replacement" in second


# ---- sections -------------------------------------------------------------------------------


def test_fresh_config(config: CompilerConfig) -> None:
    assert config.mode.value == "max-autotune"
    assert config.debug.run_eagerly.value == "0"
    assert bool(config.debug.run_eagerly) is False
    assert config.debug.aclgraph.static_capture_size_limit.value == "64"


def test_tree_has_the_expected_number_of_leaves(config: CompilerConfig) -> None:
    # 71 of the original, the hidden directory of the summary, strict_converters, native_code,
    # kernel_cache, super_kernels and tuned_kernels, three that only npugraph_ex had, four of
    # capture that are ours, the timeline and the report, strict, and numerics.
    assert len(list(leaves(config))) == 71 + 1 + 5 + 3 + 4 + 2 + 1 + 1 + 1


def test_assignment_keeps_the_option_object(config: CompilerConfig) -> None:
    option = config.mode
    config.mode = "npugraph_ex"
    assert config.mode is option and option.value == "npugraph_ex"
    config.mode.value = "reduce-overhead"
    assert config.mode.value == "reduce-overhead"


def test_configs_share_no_state(config: CompilerConfig) -> None:
    config.debug.aclgraph.clone_input = False
    config.aclgraph_config.use_custom_pool = (0, 1)
    config.npugraphex_config.clone_output = True
    other = CompilerConfig()
    assert other.debug.aclgraph.clone_input.value == "1"
    assert other.aclgraph_config.use_custom_pool is None
    assert other.npugraphex_config.clone_output is False


@pytest.mark.parametrize("path", ["typo", "debug.typo", "debug.graph_dump.enabled", "ge_config.x"])
def test_unknown_name_lists_the_legal_ones(config: CompilerConfig, path: str) -> None:
    parent, _, name = path.rpartition(".")
    section = attrgetter(parent)(config) if parent else config
    with pytest.raises(ValueError) as caught:
        setattr(section, name, 1)
    text = str(caught.value)
    assert text.startswith(f"{type(section).__name__} has no option {name}, all options ")
    assert CODE_LINE not in text
    assert all(legal in text for legal in section.settable)


def test_sub_section_can_be_replaced(config: CompilerConfig) -> None:
    other = CompilerConfig()
    other.debug.run_eagerly = True
    config.debug = other.debug
    assert config.debug is other.debug
    assert config.as_dict()[0]["run_eagerly"] == "1"


def test_plain_sections_cannot_be_replaced(config: CompilerConfig) -> None:
    for name in ("aclgraph_config", "npugraphex_config"):
        with pytest.raises(ValueError, match=name):
            setattr(config, name, None)


def test_export_section_is_open_but_its_experimental_part_is_not(config: CompilerConfig) -> None:
    assert config.export.export_mode.value == "0"
    config.export.export_mode = "anything"
    assert read_path(config, "export.export_mode") == "anything"
    config.export.invented = 3
    assert read_path(config, "export.invented") == 3
    with pytest.raises(ValueError):
        config.export.experimental.enable_lite_export = "anything"
    with pytest.raises(ValueError):
        config.export.experimental.invented = 3


def test_dump_paths(config: CompilerConfig, tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    for dump in (config.debug.graph_dump, config.debug.data_dump):
        assert dump.path == "."
        dump.path = str(link / "new")
        assert dump.path == str(real / "new")
        assert not (real / "new").exists()
        with pytest.raises(TypeError):
            dump.path = None  # type: ignore[assignment]
    with pytest.raises(ValueError, match="FxSummaryConfig"):
        config.debug.fx_summary.path = "x"
    config.debug.fx_summary._path = "x"
    assert config.debug.fx_summary._path.value == "x"


def test_dump_is_enabled_by_its_type(config: CompilerConfig) -> None:
    assert not config.debug.graph_dump.enabled
    config.debug.graph_dump.type = "py"
    assert config.debug.graph_dump.enabled


REJECTED_ON_TREE: list[tuple[str, Any, type[Exception]]] = [
    ("mode", "default", ValueError),
    ("post_grad_custom_pre_pass", 1, TypeError),
    ("debug.graph_dump.type", "json", ValueError),
    ("debug.data_dump.type", "pt", ValueError),
    ("debug.fx_summary.type", "txt", ValueError),
    ("debug.aclgraph.static_capture_size_limit", 0, ValueError),
    ("debug.aclgraph.static_capture_size_limit", 2**63, ValueError),
    ("debug.aclgraph.capture_error_mode", "strict", ValueError),
    ("debug.aclgraph.capture_warmups", -1, ValueError),
    ("aoe_config.aoe_mode", "1", ValueError),
    ("aoe_config.work_path", None, FileNotFoundError),
    ("aoe_config.aoe_config_file", "./missing", FileNotFoundError),
    ("dump_config.dump_path", "./*****", FileNotFoundError),
    ("dump_config.dump_mode", "none", ValueError),
    ("dump_config.dump_layer", "Add|", ValueError),
    ("dump_config.dump_data", "csv", ValueError),
    ("dump_config.dump_config_path", "./missing", FileNotFoundError),
    ("dump_config.dump_config_path", "", ValueError),
    ("dump_config.data_dump_stage", "middle", ValueError),
    ("fusion_config.fusion_switch_file", "./missing", FileNotFoundError),
    ("experimental_config.static_model_ops_lower_limit", "-1", ValueError),
    ("experimental_config.static_model_ops_lower_limit", -2, ValueError),
    ("experimental_config.static_model_ops_lower_limit", None, ValueError),
    ("experimental_config.jit_compile", True, ValueError),
    ("experimental_config.topology_sorting_strategy", "dfs", ValueError),
    ("experimental_config.strict_converters", None, ValueError),
    ("experimental_config.aclgraph._aclnn_static_shape_kernel_build_dir", 1, TypeError),
    ("experimental_config.aclgraph._aclnn_static_shape_kernel_sym_value_range", 1, TypeError),
    ("experimental_config.aclgraph._aclnn_static_shape_kernel_sym_index", -1, ValueError),
    ("experimental_config.aclgraph._super_kernel_optimize_options", "x", TypeError),
    ("inference_config.dynamic_gears_merge_policy", "sum", ValueError),
    ("ge_config.oo_level", "O2", ValueError),
    ("ge_config.oo_constant_folding", "on", ValueError),
    ("ge_config.export_compile_stat", 1, ValueError),
    ("ge_config.optimization_switch", {}, TypeError),
]


@pytest.mark.parametrize(("path", "value", "error"), REJECTED_ON_TREE)
def test_tree_rejects(
    config: CompilerConfig, path: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=rf"option '{path.rpartition('.')[2]}' cannot be") as caught:
        write_path(config, path, value)
    assert CODE_LINE not in str(caught.value)
    assert config == CompilerConfig()


@pytest.mark.parametrize(
    ("path", "value", "shown"),
    [
        ("experimental_config.static_model_ops_lower_limit", 0, "0"),
        ("experimental_config.static_model_ops_lower_limit", -1, "-1"),
        ("dump_config.dump_layer", 'Add_1Mul_1/Square\\Add_2.Add_4 "Add5"', None),
        ("debug.aclgraph.static_capture_size_limit", 2**63 - 1, str(2**63 - 1)),
        ("ge_config.oo_constant_folding", None, None),
        ("ge_config.aicore_num", "24|48", "24|48"),
        ("experimental_config.aot_config_output_loss_index", 2, "2"),
    ],
)
def test_tree_accepts(config: CompilerConfig, path: str, value: Any, shown: str | None) -> None:
    write_path(config, path, value)
    assert read_path(config, path) == value
    assert attrgetter(path)(config).value == (value if shown is None else shown)


@pytest.mark.parametrize("steps", ["", "0", "12", "0|1|2-5|6", "10-20", "0|"])
def test_dump_step_accepts(config: CompilerConfig, steps: str) -> None:
    config.dump_config.dump_step = steps
    assert config.dump_config.dump_step.value == steps


@pytest.mark.parametrize(
    "steps", ["0ad", "0|2&", "--", "1-", "-1", "02||||34", "1--6", "|1", "1-2-3", "1-23-4"]
)
def test_dump_step_rejects(config: CompilerConfig, steps: str) -> None:
    with pytest.raises(ValueError):
        config.dump_config.dump_step = steps


def test_dump_step_checks_long_text_quickly(config: CompilerConfig) -> None:
    start = time.perf_counter()
    with pytest.raises(ValueError):
        config.dump_config.dump_step = "1" * 5000 + "x"
    assert time.perf_counter() - start < 1.0


# ---- equality and copies --------------------------------------------------------------------


def test_equality_compares_leaves(config: CompilerConfig) -> None:
    other = CompilerConfig()
    assert config == other
    config.debug.run_eagerly = True
    assert config != other
    other.debug.run_eagerly = 1
    assert config == other
    other.aclgraph_config.use_custom_pool = (0, 1)
    assert config != other
    assert config != "config"
    with pytest.raises(TypeError):
        hash(config)


def test_equality_ignores_none_and_sees_the_open_section(config: CompilerConfig) -> None:
    other = CompilerConfig()
    config.export.invented = None
    assert config == other
    config.export.export_mode = True
    assert config != other
    other.export.export_mode = True
    assert config == other


class LockedPass:
    """A user's pass that cannot be deep-copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, gm: Any, example_inputs: Any, config: Any) -> None: ...


def test_deepcopy_shares_callables_and_nothing_else(config: CompilerConfig) -> None:
    user_pass = LockedPass()
    config.post_grad_custom_pre_pass = user_pass
    config.post_grad_custom_post_pass = lambda gm, example_inputs, config: None
    config.debug.data_dump.filter = user_pass
    config.experimental_config.aclgraph._super_kernel_optimize_options = {"a": [1]}
    clone = copy.deepcopy(config)
    assert clone == config and clone is not config
    assert clone.post_grad_custom_pre_pass.value is user_pass
    assert clone.debug.data_dump.filter.value is user_pass
    options = clone.experimental_config.aclgraph._super_kernel_optimize_options.value
    assert options is not read_path(
        config, "experimental_config.aclgraph._super_kernel_optimize_options"
    )
    clone.debug.run_eagerly = True
    assert config.debug.run_eagerly.value == "0"
    assert clone.as_dict()[0]["run_eagerly"] == "1"
    with pytest.raises(ValueError):
        clone.debug.run_eagerly = "yes"
    with pytest.raises(ValueError):
        clone.typo = 1


def test_pickle_round_trip(config: CompilerConfig) -> None:
    config.mode = "npugraph_ex"
    config.dump_config.dump_step = "1|2"
    loaded = pickle.loads(pickle.dumps(config))
    assert loaded == config and loaded.as_dict() == config.as_dict()
    with pytest.raises(ValueError):
        loaded.dump_config.dump_step = "x"


# ---- engine keys ----------------------------------------------------------------------------

BOTH_MODES = {
    "disable_mempool_reuse_in_same_fx": "0",
    "enable_output_clone": "0",
    "static_capture_size_limit": "64",
    "clone_input": "1",
    "run_eagerly": "0",
    "deadlock_check": "0",
    "remove_noop_ops": "1",
    "pattern_fusion_pass": "1",
    "frozen_parameter": "0",
}


def test_keys_of_a_fresh_config(config: CompilerConfig) -> None:
    assert config.as_dict() == (
        {
            "mode": "max-autotune",
            **BOTH_MODES,
            "ge.tiling_schedule_optimize": "0",
            "ge.featureBaseRefreshable": "0",
            "ge.topoSortingMode": "1",
            "ge.jit_compile": "2",
        },
        {
            "ge.exec.enableEngineParallel": "0",
            "ge.enableSingleStream": "false",
            "ge.oo.level": "O3",
            "ge.exportCompileStat": "2",
        },
    )


@pytest.mark.parametrize("mode", ["reduce-overhead", "npugraph_ex"])
def test_keys_of_the_capture_modes(config: CompilerConfig, mode: str) -> None:
    config.mode = mode
    assert config.as_dict() == ({"mode": mode, **BOTH_MODES}, {})


def test_keys_of_a_section_follow_the_asked_mode(config: CompilerConfig) -> None:
    assert config.ge_config.as_dict("npugraph_ex") == ({}, {})
    assert "ge.oo.level" in config.ge_config.as_dict("max-autotune")[1]
    assert config.ge_config.as_dict() == config.ge_config.as_dict("max-autotune")


@pytest.mark.parametrize(
    ("path", "value", "scope", "key", "emitted"),
    [
        ("experimental_config.cc_parallel_enable", True, 1, "ge.exec.enableEngineParallel", "1"),
        ("experimental_config.memory_efficiency", True, 0, "ge.featureBaseRefreshable", "1"),
        (
            "experimental_config.static_model_ops_lower_limit",
            -1,
            0,
            "ge.exec.static_model_ops_lower_limit",
            "-1",
        ),
        (
            "experimental_config.tiling_schedule_optimize",
            True,
            0,
            "ge.tiling_schedule_optimize",
            "1",
        ),
        ("experimental_config.topology_sorting_strategy", "BFS", 0, "ge.topoSortingMode", "0"),
        ("experimental_config.topology_sorting_strategy", "RDFS", 0, "ge.topoSortingMode", "2"),
        (
            "experimental_config.topology_sorting_strategy",
            "StableRDFS",
            0,
            "ge.topoSortingMode",
            "3",
        ),
        ("ge_config.enable_single_stream", True, 1, "ge.enableSingleStream", "true"),
        ("ge_config.oo_level", "O1", 1, "ge.oo.level", "O1"),
        ("ge_config.oo_level", "O1", 0, "ge.topoSortingMode", "3"),
        ("ge_config.oo_constant_folding", False, 1, "ge.oo.constantFolding", "false"),
        ("ge_config.oo_dead_code_elimination", True, 1, "ge.oo.deadCodeElimination", "true"),
        ("ge_config.export_compile_stat", "0", 1, "ge.exportCompileStat", "0"),
        ("ge_config.aicore_num", "24|48", 1, "ge.aicoreNum", "24|48"),
        ("ge_config.optimization_switch", "A:off", 1, "ge.optimizationSwitch", "A:off"),
    ],
)
def test_engine_keys(
    config: CompilerConfig, path: str, value: Any, scope: int, key: str, emitted: str
) -> None:
    write_path(config, path, value)
    assert config.as_dict()[scope][key] == emitted
    config.mode = "npugraph_ex"
    assert key not in config.as_dict()[scope]


def test_file_keys(config: CompilerConfig, tmp_path: Path) -> None:
    table = tmp_path / "a.json"
    table.write_text(json.dumps({"Switch": {}}))
    config.fusion_config.fusion_switch_file = str(table)
    config.dump_config.dump_config_path = str(table)
    shared = config.as_dict()[1]
    assert shared["ge.fusionSwitchFile"] == shared["ge_dump_with_acl_config"] == str(table)


def test_custom_passes_emit_nothing(config: CompilerConfig) -> None:
    before = config.as_dict()
    config.post_grad_custom_pre_pass = print
    config.post_grad_custom_post_pass = print
    assert config.as_dict() == before


def test_dump_keys(config: CompilerConfig, tmp_path: Path) -> None:
    config.dump_config.dump_path = str(tmp_path)
    config.dump_config.dump_mode = "input"
    assert not [key for key in config.as_dict()[1] if "dump" in key.lower()]
    config.dump_config.enable_dump = True
    directory = str(tmp_path / "worldsize1_global_rank0")
    keys = {
        "ge.exec.enableDump": "1",
        "ge.exec.dumpPath": directory,
        "ge.exec.dumpMode": "input",
        "ge.quant_dumpable": "0",
        "ge.exec.dumpData": "tensor",
    }
    assert config.dump_config.as_dict() == ({}, keys)
    config.dump_config.dump_step = "1|2-3"
    config.dump_config.dump_layer = "Add Mul"
    steps = {"ge.exec.dumpStep": "1|2-3", "ge.exec.dumpLayer": "Add Mul"}
    assert config.dump_config.as_dict() == ({}, keys | steps)
    assert config.dump_config.as_dict("reduce-overhead") == (
        {},
        {
            "aclgraph.enableDump": "1",
            "aclgraph.dumpPath": directory,
            "aclgraph.dumpStage": "optimized",
        },
    )


def test_rank_directory_of_a_distributed_job(monkeypatch: pytest.MonkeyPatch) -> None:
    class Job:
        is_available = is_initialized = staticmethod(lambda: True)
        get_world_size = staticmethod(lambda: 4)
        get_rank = staticmethod(lambda: 2)

    monkeypatch.setitem(sys.modules, "torch.distributed", Job)
    assert rank_directory("root") == "root/worldsize4_global_rank2"
    monkeypatch.setattr(Job, "is_initialized", staticmethod(lambda: False))
    assert rank_directory("root") == "root/worldsize1_global_rank0"


def test_kernel_keys_need_their_master_switch(config: CompilerConfig) -> None:
    config.mode = "npugraph_ex"
    kernels = config.experimental_config.aclgraph
    kernels._aclnn_static_shape_kernel_sym_value_range = [1, 2]
    kernels._super_kernel_debug_options = {"a": 1}
    assert kernels.as_dict("npugraph_ex") == ({}, {})
    kernels._aclnn_static_shape_kernel = True
    static_kernel = {
        "_aclnn_static_shape_kernel": "1",
        "_aclnn_static_shape_kernel_build_dir": "",
        "_aclnn_static_shape_kernel_sym_value_range": [1, 2],
        "_aclnn_static_shape_kernel_sym_index": "0",
    }
    assert kernels.as_dict("npugraph_ex") == (static_kernel, {})
    kernels._super_kernel_optimize = True
    super_kernel = {"_super_kernel_optimize": "1", "_super_kernel_debug_options": {"a": 1}}
    assert kernels.as_dict("npugraph_ex") == (static_kernel | super_kernel, {})
    assert kernels.as_dict("max-autotune") == ({}, {})


def test_tuning_keys_need_the_mode(config: CompilerConfig) -> None:
    assert config.aoe_config.as_dict() == ({}, {})
    config.aoe_config.aoe_mode = "2"
    assert config.aoe_config.as_dict() == ({"aoe_mode": "2", "work_path": "./"}, {})


def test_export_keys(config: CompilerConfig) -> None:
    config.export.export_name = "model"
    assert config.export.as_dict() == ({}, {})
    config.export.export_mode = True
    assert config.export.as_dict() == ({"export_path_dir": "./", "export_name": "model"}, {})


# ---- flat options ---------------------------------------------------------------------------


def test_alias_defaults(config: CompilerConfig) -> None:
    assert len(OPTION_ALIASES) == 23 + 3
    defaults = config.npugraphex_config.as_dict()
    on = {name for name, value in defaults.items() if value is True}
    assert on == {
        "reuse_graph_pool_in_same_fx",
        "clone_input",
        "capture_fallback",
        "remove_noop_ops",
        "remove_cat_ops",
        "inplace_pass",
        "input_inplace_pass",
        "pattern_fusion_pass",
    }
    assert defaults["capture_limit"] == 64
    assert defaults["data_dump_stage"] == "optimized"
    assert defaults["data_dump_dir"] == "./"
    assert defaults["use_graph_pool"] is None


ALIAS_VALUES: dict[str, Any] = {
    "numerics": "strict",
    "use_graph_pool": (0, 7),
    "capture_limit": 3,
    "super_kernel_optimize_options": {"a": 1},
    "super_kernel_debug_options": {"b": 2},
    "post_grad_custom_pre_pass": print,
    "post_grad_custom_post_pass": print,
    "data_dump_stage": "original",
    "data_dump_dir": ".",
    "_vllm_aclnn_static_kernel_sym_index": 2,
    "_vllm_aclnn_static_kernel_sym_range": [4, 8],
}


@pytest.mark.parametrize("name", sorted(OPTION_ALIASES))
def test_each_alias_reaches_its_option(config: CompilerConfig, name: str) -> None:
    default = config.npugraphex_config.as_dict()[name]
    value = ALIAS_VALUES.get(name, not default)
    apply_options(config, {name: value})
    alias = OPTION_ALIASES[name]
    assert read_path(config, alias.path) == (not value if alias.inverted else value)
    assert config.npugraphex_config.as_dict()[name] == value
    changed = [path for path, now in leaves(config) if now != read_path(CompilerConfig(), path)]
    assert changed == [alias.path]


@pytest.mark.parametrize(("value", "stored"), [(True, "0"), (False, "1"), (1, "0"), (0, "1")])
def test_inversion_maps_switches(config: CompilerConfig, value: Any, stored: str) -> None:
    apply_options(config, {"inplace_pass": value})
    assert config.debug.aclgraph.disable_reinplace_inplaceable_ops_pass.value == stored


@pytest.mark.parametrize("value", ["test", 2, None])
def test_inversion_leaves_the_rest_to_validation(config: CompilerConfig, value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        apply_options(config, {"inplace_pass": value})
    assert repr(value) in str(caught.value) and "[True, False]" in str(caught.value)


def test_unknown_flat_option_lists_sorted_names_and_sets_nothing(config: CompilerConfig) -> None:
    with pytest.raises(ValueError) as caught:
        apply_options(config, {"clone_input": False, "typo": 1})
    assert "'typo'" in str(caught.value)
    assert ", ".join(sorted(OPTION_ALIASES)) in str(caught.value)
    assert config == CompilerConfig()


def test_flat_view_writes_and_rejects(config: CompilerConfig) -> None:
    view = config.npugraphex_config
    view.inplace_pass = False
    assert config.debug.aclgraph.disable_reinplace_inplaceable_ops_pass.value == "1"
    assert view.inplace_pass is False
    assert "inplace_pass" in dir(view)
    with pytest.raises(ValueError):
        view.typo = 1
    with pytest.raises(AttributeError):
        _ = view.typo


# ---- warnings -------------------------------------------------------------------------------


def recorded(function: Callable[[CompilerConfig], None], config: CompilerConfig) -> list[Any]:
    """Warnings of a call in a process that has not had them; a second call is told nothing."""
    log._warned.clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function(config)
        count = len(found)
        function(config)
    assert len(found) == count
    return found


def test_default_config_does_not_warn(config: CompilerConfig) -> None:
    assert recorded(warn_ineffective, config) == []


def test_every_option_is_declared_once_and_in_order(config: CompilerConfig) -> None:
    assert [(path, option.default) for path, option in OPTIONS.items()] == list(leaves(config))
    abouts = [option.about for option in OPTIONS.values()]
    warned = [about.where for about in abouts if about.ineffective is not None]
    assert (warned.count("capture"), len(warned)) == (5, 5 + 19)
    assert all(about.effect.startswith(EFFECTS) for about in abouts)
    fields = [e.field for option in OPTIONS.values() for e in option.emissions if e.field]
    assert len(set(fields)) == len(fields) == len(engine_keys()) + len(engine_keys("dump"))


def test_one_warning_in_max_autotune(config: CompilerConfig) -> None:
    config.debug.aclgraph.clone_input = False
    config.debug.aclgraph.disable_reinplace_inplaceable_ops_pass = True
    config.experimental_config.aclgraph._aclnn_static_shape_kernel_build_dir = "somewhere"
    (found,) = recorded(warn_ineffective, config)
    assert found.category is UserWarning
    assert str(found.message) == (
        "config may not take effect or report error in max-autotune mode: "
        "config.debug.aclgraph.disable_reinplace_inplaceable_ops_pass:True, "
        "config.debug.aclgraph.clone_input:False, "
        "config.experimental_config.aclgraph._aclnn_static_shape_kernel_build_dir:somewhere"
    )


def test_reduce_overhead_warns_twice(config: CompilerConfig) -> None:
    config.mode = "reduce-overhead"
    first, second = recorded(warn_ineffective, config)
    assert first.category is UserWarning
    assert str(first.message).endswith(
        "config.experimental_config.enable_view_optimize:True, "
        "set_dim_gears, dynamo_export, scope, npu_print"
    )
    assert second.category is DeprecationWarning and "npugraph_ex" in str(second.message)


INEFFECTIVE_IN_REDUCE_OVERHEAD: list[tuple[str, Any]] = [
    ("inference_config.dynamic_gears_merge_policy", "product"),
    ("debug.fx_summary.type", "csv"),
    ("dump_config.enable_dump", True),
    ("ge_config.export_compile_stat", "0"),
    ("ge_config.export_compile_stat", "1"),
    ("export.experimental.auto_atc_config_generated", True),
    ("export.experimental.enable_record_nn_module_stack", True),
    ("ge_config.enable_single_stream", True),
    ("ge_config.oo_level", "O1"),
    ("ge_config.oo_constant_folding", False),
    ("ge_config.oo_dead_code_elimination", True),
    ("experimental_config.topology_sorting_strategy", "BFS"),
    ("experimental_config.topology_sorting_strategy", "StableRDFS"),
    ("experimental_config.cc_parallel_enable", 1),
    ("experimental_config.enable_ref_data", True),
    ("experimental_config.tiling_schedule_optimize", True),
    ("experimental_config.enable_view_optimize", False),
    ("fusion_config.fusion_switch_file", __file__),
    ("experimental_config.static_model_ops_lower_limit", 0),
    ("ge_config.aicore_num", "1|1"),
    ("ge_config.optimization_switch", "A:on"),
]


@pytest.mark.parametrize(("path", "value"), INEFFECTIVE_IN_REDUCE_OVERHEAD)
def test_reduce_overhead_names_the_option(config: CompilerConfig, path: str, value: Any) -> None:
    config.mode = "reduce-overhead"
    write_path(config, path, value)
    assert f"config.{path}:{value}" in str(recorded(warn_ineffective, config)[0].message)
    config.mode = "npugraph_ex"
    assert recorded(warn_ineffective, config) == []


def test_switches_without_effect_warn_in_the_capture_modes(config: CompilerConfig) -> None:
    config.experimental_config.aclgraph._super_kernel_optimize = True
    config.experimental_config.aclgraph._aclnn_static_shape_kernel = True
    for mode in CAPTURE_MODES:
        config.mode = mode
        (found,) = recorded(warn_unsupported, config)
        assert found.category is UserWarning
        assert str(found.message) == (
            "no effect on this device: "
            "config.experimental_config.aclgraph._aclnn_static_shape_kernel: "
            "kernels of CPU and CUDA are not compiled for single shapes; "
            "config.experimental_config.aclgraph._super_kernel_optimize: "
            "it is about kernels of an NPU; see `super_kernels` (leave it out)"
        )


def other_value(option: Any, tmp_path: Path) -> Any:
    """A value of an option that is not its default; None where there is no other."""
    kinds = {
        IntRangeValue: lambda: option.default + 1 if option.default is not None else 2,
        IntListValue: lambda: [1], StrOptionValue: lambda: "x", DictOptionValue: lambda: {"a": 1},
        CallableValue: lambda: len, MustExistedPathValue: lambda: str(tmp_path),
        FileValue: lambda: str(tmp_path / "a.json"), RegexValue: lambda: "1",
        MustExistedFileAddr: lambda: str(tmp_path / "a.json"),
    }  # fmt: skip
    if not isinstance(option, OptionValue):  # a path, or the handle of a pool
        return str(tmp_path) if isinstance(option, str) else (0, 1)
    if type(option) in kinds:
        return kinds[type(option)]()
    if option.optional is None:
        return 5
    others = [v for v in option.optional if v != option.default and v is not None]
    return others[0] if others else None


def warned_paths(config: CompilerConfig) -> set[str]:
    """Options that some warning about a configuration names."""
    found = [*recorded(warn_ineffective, config), *recorded(warn_unsupported, config)]
    text = " ".join(str(w.message) for w in found)
    return {path for path, _ in leaves(config) if f"config.{path}:" in text}


@pytest.mark.parametrize("mode", ["max-autotune", *CAPTURE_MODES])
def test_no_option_is_silent(mode: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    for leaf, option in OPTIONS.items():
        path, where, effect = public_path(leaf), option.about.where, option.about.effect
        config = CompilerConfig()
        value = other_value(attrgetter(path)(config), tmp_path)
        if path == "debug.report.path":
            value = str(tmp_path / "report.html")
        if value is None or path in ("mode", "export.export_mode"):  # the latter is set for users
            continue
        write_path(config, path, value)
        config.mode = mode
        here = where == "both" or ("GE" if mode == "max-autotune" else "capture") in where
        idle = not effect.startswith("works") or not here
        if idle:
            assert leaf in warned_paths(config), (path, mode, where, effect)
        else:
            assert recorded(warn_unsupported, config) == [], (path, mode, where, effect)


def test_frozen_parameter_reminder(config: CompilerConfig) -> None:
    assert recorded(warn_frozen_parameter, config) == []
    config.experimental_config.frozen_parameter = True
    (found,) = recorded(warn_frozen_parameter, config)
    assert found.category is UserWarning and "frozen_parameter" in str(found.message)


# ---- snapshot -------------------------------------------------------------------------------


def test_settings_of_a_fresh_config(config: CompilerConfig) -> None:
    settings = Settings.of(config)
    values = {entry.name: getattr(settings, entry.name) for entry in dataclasses.fields(settings)}
    local_options, global_options = config.as_dict()
    assert values == {
        "mode": "max-autotune",
        "post_grad_custom_pre_pass": None,
        "post_grad_custom_post_pass": None,
        "numerics": "default",
        "deadlock_check": False,
        "graph_dump_type": None,
        "graph_dump_path": ".",
        "data_dump_type": None,
        "data_dump_path": ".",
        "data_dump_filter": None,
        "report_path": None,
        "fx_summary_type": None,
        "fx_summary_path": ".",
        "fx_summary_skip_compile": True,
        "strict": False,
        "run_eagerly": False,
        "frozen_parameter": False,
        "enable_view_optimize": True,
        "remove_noop_ops": True,
        "pattern_fusion_pass": True,
        "strict_converters": False,
        "capture": CaptureOptions(
            clone_input=True,
            clone_output=False,
            share_results=False,
            frozen_parameter=False,
            reuse=True,
            limit=64,
            evict=False,
            pool=None,
            error_mode="global",
            fallback=True,
            warmups=0,
            force_recapture=False,
        ),
        "remove_cat_ops": True,
        "inplace_pass": True,
        "input_inplace_pass": True,
        "tensor_dump": False,
        "tensor_dump_path": "./worldsize1_global_rank0",
        "tensor_dump_stage": "optimized",
        "record_modules": False,
        "local_options": local_options,
        "global_options": global_options,
    }


def test_settings_hold_plain_values(config: CompilerConfig) -> None:
    config.debug.run_eagerly = 1
    config.debug.fx_summary._path = Path("x")
    config.post_grad_custom_pre_pass = print
    settings = Settings.of(config)
    assert settings.run_eagerly is True
    assert settings.fx_summary_path == "x"
    assert settings.post_grad_custom_pre_pass is print


def test_settings_hold_inverted_switches(config: CompilerConfig) -> None:
    switches = config.debug.aclgraph
    switches.disable_reinplace_inplaceable_ops_pass = 1
    switches.disable_reinplace_input_mutated_ops_pass = True
    switches.disable_mempool_reuse_in_same_fx = True
    settings = Settings.of(config)
    assert (settings.inplace_pass, settings.input_inplace_pass) == (False, False)
    assert settings.capture.reuse is False


def test_settings_are_frozen(config: CompilerConfig) -> None:
    config.mode = "npugraph_ex"
    kernels = config.experimental_config.aclgraph
    kernels._super_kernel_optimize = True
    kernels._super_kernel_optimize_options = {"a": 1}
    settings = Settings.of(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.mode = "max-autotune"  # type: ignore[misc]
    with pytest.raises(TypeError):
        settings.local_options["mode"] = "x"  # type: ignore[index]
    kernels._super_kernel_optimize_options.value["a"] = 2
    config.debug.run_eagerly = True
    assert settings.local_options["_super_kernel_optimize_options"] == {"a": 1}
    assert settings.run_eagerly is False


def test_parse_switches() -> None:
    assert parse_switches(None) == {} == parse_switches("")
    assert parse_switches("A:on;A:off") == {"A": False}
    assert parse_switches("group:A:on") == {"group:A": True}
    for wrong in ("A", "A:maybe", ":on", "A:on;B"):
        with pytest.raises(ValueError, match="optimization_switch"):
            parse_switches(wrong)


# ---- modes and imports ---------------------------------------------------------------


def test_every_mode_is_legal(config: CompilerConfig) -> None:
    for mode in ALL_MODES:
        config.mode = mode
        assert config.as_dict()[0]["mode"] == mode


def imported_modules(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    plain = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    return plain | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


def test_room_imports_only_the_layer_below() -> None:
    rooms = ("configs", "errors", "flags", "log", "process")
    below = tuple(f"torchair.{room}" for room in rooms)
    for file in Path(compiler_config.__file__).parent.glob("*.py"):
        for module in imported_modules(file):
            top = module.partition(".")[0]
            assert top in sys.stdlib_module_names or module.startswith(below), (file, module)


def test_a_config_shows_the_options_that_are_not_as_usual() -> None:
    config = CompilerConfig()
    assert repr(config) == "CompilerConfig()"
    config.mode = "npugraph_ex"
    config.debug.graph_dump.type = "py"
    assert repr(config) == "CompilerConfig(mode='npugraph_ex', debug.graph_dump.type='py')"
    assert repr(config.debug) == "DebugConfig(graph_dump.type='py')"
