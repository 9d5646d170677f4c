"""Why an operator is not converted, or a node not made: one sentence for each reason."""

from __future__ import annotations


class ConverterErrorMsg:
    """Sentences with places for names and counts, under the names that the original gives them.

    An error begins with such a sentence; what to do about it follows.
    """

    _GENERATED = "auto-generation of a converter failed for {target}: "

    NOT_OP_OVERLOAD = f"{_GENERATED}it is not an operator overload"
    BUILTIN_OP = f"{_GENERATED}operators of torch itself are built in"
    SCALAR_INPUT = f"{_GENERATED}argument '{{name}}' is a Scalar, which no attribute kind holds"
    GE_IR_NOT_REGISTERED = "the GE operator {name} is not registered"
    TENSOR_INPUTS_COUNT_MISMATCH = (
        f"{_GENERATED}its tensor arguments {{tensor_inputs}} are not as many as the inputs "
        "{ge_inputs} of {ge_name}"
    )
    NON_TENSOR_INPUTS_COUNT_MISMATCH = (
        f"{_GENERATED}its other arguments {{non_tensor_inputs}} are more than the attributes "
        "{ge_attrs} of {ge_name}"
    )
    OUTPUTS_COUNT_MISMATCH = (
        f"{_GENERATED}it has {{outputs_count}} written arguments and results, {{ge_name}} has "
        "{ge_outputs_count} outputs"
    )
    INPLACE_COUNT_MISMATCH = (
        f"{_GENERATED}it writes to {{inplace_count}} arguments, {{ge_name}} updates "
        "{ge_inplace_count} inputs"
    )
    ARGS_COUNT_MISMATCH = "{op_type} takes {expected} inputs and attributes, got {actual} arguments"
    INPUT_TYPE_REQUIRED = "{op_type}: the {param_type} input '{name}' takes a ge.Tensor"
    INPUT_TYPE_DYNAMIC = "{op_type}: the {param_type} input '{name}' takes a list of ge.Tensor"
    INPUT_TYPE_OPTIONAL = "{op_type}: the {param_type} input '{name}' takes a ge.Tensor or None"
    TORCH_TYPE_TO_GE_TYPE_UN_SUPPORT = "{dtype} has no data type in the GE operator IR"
