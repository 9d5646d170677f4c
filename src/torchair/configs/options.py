"""What the configuration is made of: option values, which say what they accept, how they read back
and which engine keys they emit; and sections, whose class bodies list their options.

Knows nothing of the tree that is built from them; imports only the error scheme.
"""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, Self, TypeVar

from torchair.errors import did_you_mean

MAX_AUTOTUNE = "max-autotune"
REDUCE_OVERHEAD = "reduce-overhead"
NPUGRAPH_EX = "npugraph_ex"

TORCH_MODES: Mapping[str, str | None] = {
    "default": None,
    "lite": None,
    MAX_AUTOTUNE: MAX_AUTOTUNE,
    "max-autotune-no-cudagraphs": MAX_AUTOTUNE,
    REDUCE_OVERHEAD: REDUCE_OVERHEAD,
    NPUGRAPH_EX: NPUGRAPH_EX,
}
"""What `torch.compile(mode=...)` may be, and which mode it means: None is that of the config."""

GE_MODES = (MAX_AUTOTUNE,)
CAPTURE_MODES = (REDUCE_OVERHEAD, NPUGRAPH_EX)
ALL_MODES = GE_MODES + CAPTURE_MODES

Numerics = Literal["default", "strict", "batch_invariant"]
"""What results may depend on: `strict` are eager's bits, `batch_invariant` does not depend on the
batch around a row."""

INT64_MAX = 2**63 - 1


Where = Literal["both", "GE", "capture"]
"""The modes in which an option has an effect: all, max-autotune, or those that capture."""


@dataclass(frozen=True)
class Emission:
    """One engine key that an option contributes to ``as_dict``."""

    key: str | None  # None is the option's own name
    scope: Literal["local", "global"] = "local"
    modes: tuple[str, ...] = GE_MODES
    when: str | None = None  # a sibling option that must be true
    encode: Callable[[Any], object] | None = None  # else the normalised value; None emits nothing
    assigned: bool = False  # whether it is there only where a value was chosen
    field: str | None = None  # what the engine calls the option
    decode: Callable[[str | None], Any] | None = None  # of the emitted text; else ``option.read``


class Alias(NamedTuple):
    """Another name of an option; ``inverted`` when it says the opposite, ``own`` when only the flat
    configuration of ``npugraph_ex`` has it."""

    name: str
    inverted: bool = False
    own: bool = False
    path: str = ""  # of the option in the tree


@dataclass(frozen=True)
class About:
    """What users read about an option."""

    where: Where = "both"
    effect: str = "works"  # the line of docs/options.md
    idle: str | None = None  # why it does nothing on this device
    elsewhere: str | None = None  # why it does nothing in the other modes
    exports: bool = False  # whether dynamo_export reads it
    ineffective: tuple[Any, ...] | None = None  # values to warn about in the other mode; () is all
    flat: Alias | None = None


_UNTOLD = About()

ValueRule = tuple[Callable[[Any], bool], type[Exception], str]
"""What a value must be, and the error with its complaint where it is not."""


class OptionValue:
    """An option that takes one of ``optional``, or anything when ``optional`` is None.

    In the body of a section class it is the declaration; each instance of the section holds its
    own copy. Defaults are not validated.
    """

    accepts = "anything"  # in words; error messages and the option tables share it
    rules: ClassVar[tuple[ValueRule, ...]] = ()

    def __init__(
        self, default: Any, optional: list[Any] | tuple[Any, ...] | None = None, accepts: str = ""
    ) -> None:
        self.default = default
        self.optional = optional
        if accepts or optional is not None:
            self.accepts = accepts or str(list(optional or ()))
        self.raw = default
        self.assigned = False  # whether the value was chosen by the user
        self.name = type(self).__name__
        self.emissions: tuple[Emission, ...] = ()
        self.about = _UNTOLD

    @property
    def value(self) -> Any:
        """The normalised value: None, ``"1"`` or ``"0"`` for booleans, text for the rest."""
        return self.normalise(self.raw)

    @value.setter
    def value(self, value: Any) -> None:
        self.raw = self.check(value)
        self.assigned = True

    def check(self, value: Any) -> Any:
        """Return what to store for ``value``, or raise."""
        if self.optional is not None and value not in self.optional:
            kind = type(self.optional[0]) if self.optional else None
            self.reject(
                value,
                ValueError,
                f"Value {value!r} (type: {type(value)}) not in optional list "
                f"{self.optional!r} (type: {kind}).",
            )
        for fits, error, complaint in self.rules:
            if not fits(value):
                self.reject(value, error, complaint.format(value=value, type=type(value)))
        return value

    def normalise(self, raw: Any) -> Any:
        """The form of ``raw`` that ``value`` shows."""
        if raw is None:
            return None
        return {"True": "1", "False": "0"}.get(str(raw), str(raw))

    def reject(self, value: Any, error: type[Exception], complaint: str) -> NoReturn:
        """Raise ``error``: the complaint, then the option, the value and what would be accepted."""
        names = [str(name) for name in self.optional or () if isinstance(name, str)]
        raise error(
            f"{complaint}\noption '{self.name}' cannot be {value!r} of type "
            f"{type(value).__name__}; it accepts {self.accepts}.{did_you_mean(value, names)}"
        )

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off, perhaps undecided."""
        return self.optional is not None and list(self.optional[:2]) == [True, False]

    def plain(self, raw: Any) -> Any:
        """The form of ``raw`` that the compiler reads."""
        return bool(raw) if self.is_switch else raw

    def read(self, text: str | None) -> Any:
        """What an engine key says; the default where there is none."""
        if text is None:
            return self.default
        return text in ("1", "true") if self.is_switch else text

    # ---- declarations

    def emits(self, key: str | None = None, **how: Any) -> Self:
        """Declare an engine key, see `Emission`."""
        self.emissions += (Emission(key, **how),)
        return self

    def doc(self, where: Where, effect: str = "works", *, elsewhere: str | None = None) -> Self:
        """Say in which modes it has which effect, and why not ``elsewhere`` if that is special."""
        return self._described(where=where, effect=effect, elsewhere=elsewhere)

    def idle(self, where: Where, why: str, more: str = "") -> Self:
        """Say why it does nothing on this device; ``more`` is for the documentation alone."""
        effect = f"no effect on this device: {why} {more}".rstrip()
        return self._described(where=where, effect=effect, idle=why)

    def for_export(self, more: str, idle: str | None = "it is for dynamo_export") -> Self:
        """Say that it is read by ``dynamo_export``, and is ``idle`` otherwise."""
        return self._described(
            where="GE", effect=f"for `dynamo_export`{more}", idle=idle, exports=True
        )

    def flat(self, name: str, **how: Any) -> Self:
        """Give it a flat name, see `Alias`."""
        return self._described(flat=Alias(name, **how))

    def ineffective(self, *values: Any) -> Self:
        """Name the values, or all, that the original warns about: in max-autotune those of options
        for capture, in reduce-overhead those of others."""
        return self._described(ineffective=values)

    def _described(self, **facts: Any) -> Self:
        self.about = replace(self.about, **facts)
        return self

    def __bool__(self) -> bool:
        return bool(self.raw)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}={self.raw!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Leave the engine keys with the declaration: they hold functions that do not pickle."""
        return {**self.__dict__, "emissions": (), "about": _UNTOLD}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the value but share callables: a user's pass may hold a model or a lock."""
        clone = copy.copy(self)
        clone.raw = self.raw if callable(self.raw) else copy.deepcopy(self.raw, memo)
        return clone

    # The methods below make the declaration in the section class a descriptor, so that an option
    # reads as the instance's own copy and assignment validates instead of rebinding.

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, section: object | None, owner: type) -> Self:
        return self if section is None else section.__dict__[self.name]

    def __set__(self, section: object, value: Any) -> None:
        section.__dict__[self.name].value = value


def flag(default: bool | None, *, or_none: bool = False) -> OptionValue:
    """A boolean option, with ``or_none`` also accepting None for "not decided"."""
    return OptionValue(default, [True, False, None] if or_none else [True, False])


def or_else(usual: str | None) -> Callable[[str | None], str | None]:
    """A coding of texts: an empty one, or none, is the usual one."""
    return lambda text: text or usual


class DeprecatedValue(OptionValue):
    """An option kept for old scripts; ``as_dict`` reports a set one on stderr."""

    def __init__(
        self,
        optional: list[Any] | tuple[Any, ...] | None = None,
        *,
        replacement: str | None = None,
    ) -> None:
        super().__init__(None, optional)
        self.replacement = replacement

    def notice(self) -> str:
        """The sentence that tells the user what to use instead."""
        if self.replacement is None:
            return f"option '{self.name}' is deprecated and has no replacement"
        return f"option '{self.name}' is deprecated, use '{self.replacement}' instead"


class IntRangeValue(OptionValue):
    """An int within [low, high]."""

    def __init__(self, default: int | None, low: int, high: int) -> None:
        super().__init__(default)
        self.low, self.high = low, high
        self.accepts = f"int in [{low}, {high}]"

    def check(self, value: Any) -> Any:
        if not isinstance(value, int):
            self.reject(value, ValueError, f"Please set integer type, but got {type(value)}")
        if not self.low <= value <= self.high:
            complaint = f"Please set value in [{self.low}, {self.high}], {value} is out of range."
            self.reject(value, ValueError, complaint)
        return value

    def read(self, text: str | None) -> Any:
        return self.default if text is None else int(text)


class RegexValue(OptionValue):
    """A string that ``pattern`` matches; ``accepts`` says in words what the pattern asks for."""

    def __init__(self, default: str | None, pattern: str, accepts: str) -> None:
        super().__init__(default)
        self.pattern = re.compile(pattern)
        self.accepts = accepts

    def check(self, value: Any) -> Any:
        if not isinstance(value, str):
            self.reject(value, TypeError, f"value must be str, got {type(value)}")
        if not self.pattern.match(value):
            self.reject(
                value,
                ValueError,
                "Please set legal regex value format match "
                f"{self.pattern.pattern}, {value} is Illegal format.",
            )
        return value


class StrOptionValue(OptionValue):
    """A string or None."""

    accepts = "str or None"
    rules = (
        (lambda v: isinstance(v, str | None), TypeError, "value must be str or None, got {type}"),
    )


def _is_file(value: Any) -> bool:
    # An int would be taken for an open file descriptor by os.path.
    return isinstance(value, str | os.PathLike) and os.path.isfile(value)


class FileValue(OptionValue):
    """An existing regular file or None."""

    accepts = "existing file or None"
    rules = (
        (
            lambda v: v is None or _is_file(v),
            FileNotFoundError,
            "Please set legal file path, {value} is not found or is not a file!",
        ),
    )


class MustExistedFileAddr(OptionValue):
    """An existing ``.json`` file or None."""

    accepts = "existing .json file or None"
    rules = (
        (lambda v: v != "", ValueError, "File path cannot be empty!"),
        (
            lambda v: v is None or (_is_file(v) and str(v).endswith(".json")),
            FileNotFoundError,
            "Please set legal file path, {value} is not found or is not '.json' file!",
        ),
    )


class MustExistedPathValue(OptionValue):
    """An existing directory."""

    accepts = "existing directory"
    rules = (
        (
            lambda v: isinstance(v, str | os.PathLike) and os.path.isdir(v),
            FileNotFoundError,
            "Please set legal dir path, {value} is not found or is not a file directory!",
        ),
    )


class RawValue(OptionValue):
    """Anything, read back as the very object that was assigned."""

    def normalise(self, raw: Any) -> Any:
        return raw


class DictOptionValue(RawValue):
    """A dict or None."""

    accepts = "dict or None"
    rules = (
        (lambda v: isinstance(v, dict | None), TypeError, "value must be dict or None, got {type}"),
    )


class IntListValue(RawValue):
    """A list or tuple of int; None is stored as the empty list."""

    accepts = "list of int or None"
    rules = (
        (
            lambda v: isinstance(v, list | tuple),
            TypeError,
            "the set value must be None or list, got {type}",
        ),
    )

    def check(self, value: Any) -> Any:
        items = super().check([] if value is None else value)
        types = [type(item) for item in items]
        if not all(issubclass(kind, int) for kind in types):
            self.reject(value, TypeError, f"the set value must be int list, got list type: {types}")
        return items


class CallableValue(RawValue):
    """A callable or None."""

    accepts = "callable or None"
    rules = (
        (
            lambda v: v is None or callable(v),
            TypeError,
            "value must be Callable or None, got {type}",
        ),
    )


# ---- sections


S = TypeVar("S", bound="Section")
OptionMaps = tuple[dict[str, Any], dict[str, Any]]
"""The pair (local options, global options): of one graph, and of the engine of the process."""


class Section:
    """A section whose class body fixes the names and whose options validate on assignment."""

    declared: ClassVar[dict[str, OptionValue | Section]] = {}
    settable: ClassVar[tuple[str, ...]] = ()
    public_name: ClassVar[str] = "a section"  # how users know the class

    def __init_subclass__(
        cls, options: Mapping[str, OptionValue] | None = None, **kwargs: Any
    ) -> None:
        """``options`` are declared beside those of the class body."""
        super().__init_subclass__(**kwargs)
        for name, option in (options or {}).items():
            setattr(cls, name, option)
            option.__set_name__(cls, name)
        own = {n: m for n, m in vars(cls).items() if isinstance(m, OptionValue | Section)}
        cls.declared = cls.declared | own
        fixed = {n for n, m in cls.declared.items() if isinstance(m, PlainSection)}
        placed = [n for n in dir(cls) if isinstance(getattr(cls, n), property)]
        writable = [n for n in placed if getattr(cls, n).fset is not None]
        cls.settable = tuple(n for n in (*cls.declared, *writable) if n not in fixed)

    def __init__(self) -> None:
        for name, template in self.declared.items():
            self.__dict__[name] = copy.deepcopy(template)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.settable:
            raise ValueError(
                f"{type(self).__name__} has no option {name}, all options {list(self.settable)}."
                f"{did_you_mean(name, self.settable)}"
            )
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and _set_leaves(self) == _set_leaves(other)

    def __repr__(self) -> str:
        """The options that are not as usual."""
        usual, mine = _set_leaves(type(self)()), _set_leaves(self)
        changed = {path: value for path, value in mine.items() if usual.get(path) != value}
        texts = (f"{path}={value!r}" for path, value in changed.items())
        return f"{type(self).__name__}({', '.join(texts)})"

    def as_dict(self, mode: str | None = None) -> OptionMaps:
        """Collect (local options, global options) of this section and those below, for ``mode``."""
        mode = mode or MAX_AUTOTUNE
        collected: OptionMaps = ({}, {})
        for name, member in self.declared.items():
            if isinstance(member, OptionValue):
                self._emit(member, mode, collected)
            elif isinstance(current := vars(self)[name], Section):
                for into, found in zip(collected, current.as_dict(mode), strict=True):
                    into.update(found)
        return collected

    def _emit(self, option: OptionValue, mode: str, collected: OptionMaps) -> None:
        local_options, global_options = collected
        raw = raw_of(vars(self)[option.name])
        if isinstance(option, DeprecatedValue) and raw is not None:
            print(f"warning: {option.notice()}", file=sys.stderr)
        for emission in option.emissions:
            active = emission.when is None or bool(vars(self)[emission.when])
            if mode not in emission.modes or not active:
                continue
            if emission.assigned and not getattr(vars(self)[option.name], "assigned", True):
                continue
            if (value := (emission.encode or option.normalise)(raw)) is not None:
                target = local_options if emission.scope == "local" else global_options
                target[emission.key or option.name] = value


class OpenSection(Section):
    """A section that takes any name; assignment replaces the option object and checks nothing."""

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value


class PlainSection(OpenSection):
    """A section of ordinary attributes, which its options only describe; it cannot be replaced."""

    def __init__(self) -> None:
        self.__dict__.update({name: raw_of(option) for name, option in self.declared.items()})


def raw_of(member: Any) -> Any:
    """The stored value of an option; any other object is its own value."""
    return member.raw if isinstance(member, OptionValue) else member


def leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, raw value) of everything below ``section``, in declaration order."""
    for name, member in vars(section).items():
        if isinstance(member, Section):
            yield from leaves(member, f"{prefix}{name}.")
        else:
            yield prefix + name, raw_of(member)


def _set_leaves(section: Any) -> dict[str, Any]:
    return {path: value for path, value in leaves(section) if value is not None}


def declared(
    section: Section | type[Section], prefix: str = ""
) -> Iterator[tuple[str, OptionValue]]:
    """Yield (dotted path, declaration) of every option below ``section``, in the same order."""
    for name, member in section.declared.items():
        if isinstance(member, OptionValue):
            yield prefix + name, member
        else:
            yield from declared(member, f"{prefix}{name}.")


def given(config: Any, kind: type[S]) -> S:
    """What a user passed as configuration, a fresh one for None; TypeError for anything else."""
    if config is None:
        return kind()
    if isinstance(config, kind):
        return config
    name = getattr(config, "public_name", type(config).__name__)
    what = f"a {name}, which is not for this backend: it takes a {kind.public_name}"
    if isinstance(config, type):
        what = f"the class {config.__name__}: pass one made of it, {config.__name__}()"
    elif isinstance(config, Mapping):
        what = (
            f"a {name}: make a CompilerConfig() and set its options as attributes, or pass the "
            "dict as torch.compile(..., options={...})"
        )
    raise TypeError(f"compiler_config is {what}")


def read_path(section: Section, path: str) -> Any:
    """The raw value at a dotted path."""
    return raw_of(attrgetter(path)(section))


def write_path(section: Section, path: str, value: Any) -> None:
    """Assign to a dotted path, with the validation of the option that lives there."""
    parent, _, name = path.rpartition(".")
    setattr(attrgetter(parent)(section) if parent else section, name, value)
