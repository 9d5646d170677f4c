"""``CompilerConfig``, the root of the configuration tree, and its export and capture sections."""

from __future__ import annotations

from typing import Any

from torchair.configs.aliases import NpugraphexConfig, apply_options
from torchair.configs.compat import warn_frozen_parameter, warn_ineffective
from torchair.configs.debug import DebugConfig, DumpConfig
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
    CallableValue,
    DictOptionValue,
    EngineOptions,
    OpenSection,
    OptionValue,
    PlainSection,
    RawValue,
    Section,
    StrOptionValue,
    flag,
    leaves,
)

__all__ = ["CompilerConfig", "apply_options", "warn_frozen_parameter", "warn_ineffective"]


class ExportExperimentalConfig(Section):
    """Extras of an exported model."""

    enable_record_nn_module_stack = flag(False)
    auto_atc_config_generated = flag(False)
    enable_lite_export = flag(False)


class ExportConfig(OpenSection):
    """What ``dynamo_export`` notes down for the compilation it starts."""

    export_mode = flag(False)
    export_path_dir = StrOptionValue("./").emits("export_path_dir", when="export_mode")
    export_name = StrOptionValue(None).emits("export_name", when="export_mode")
    weight_name = DictOptionValue(None)
    inputs_name = RawValue(None)
    experimental = ExportExperimentalConfig()


class AclgraphConfig(PlainSection):
    """``use_custom_pool`` is the handle of a memory pool that the user owns, or None."""

    def __init__(self) -> None:
        self.use_custom_pool: Any = None


class CompilerConfig(Section):
    """All options of the compiler: assigning validates, reading gives the option object."""

    public_name = "torchair.CompilerConfig"

    mode = OptionValue(MAX_AUTOTUNE, ALL_MODES).emits("mode", modes=ALL_MODES)
    post_grad_custom_pre_pass = CallableValue(None)
    post_grad_custom_post_pass = CallableValue(None)
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
