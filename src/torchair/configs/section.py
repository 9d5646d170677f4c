"""Sections of the configuration tree: frozen names, validated assignment, the walk over leaves.

A section class lists its options and sub-sections in its body; the rest is derived from that list.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

from torchair.configs.options import MAX_AUTOTUNE, DeprecatedValue, OptionValue
from torchair.errors import did_you_mean

S = TypeVar("S", bound="Section")
EngineOptions = tuple[dict[str, Any], dict[str, Any]]
"""The pair (local options, global options): of one graph, and of the engine of the process."""


class PlainSection:
    """A section of ordinary attributes; it cannot be replaced and emits no engine keys."""


def _writable_properties(cls: type) -> dict[str, property]:
    members = {name: getattr(cls, name) for name in dir(cls)}
    return {
        name: member
        for name, member in members.items()
        if isinstance(member, property) and member.fset is not None
    }


class Section:
    """A section whose class body fixes the names and whose options validate on assignment."""

    declared: ClassVar[dict[str, OptionValue | Section | PlainSection]] = {}
    settable: ClassVar[tuple[str, ...]] = ()
    public_name: ClassVar[str] = "a section"  # how users know the class

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = {
            name: member
            for name, member in vars(cls).items()
            if isinstance(member, OptionValue | Section | PlainSection)
        }
        cls.declared = cls.declared | own
        cls.settable = tuple(
            name
            for name, member in {**cls.declared, **_writable_properties(cls)}.items()
            if not isinstance(member, PlainSection)
        )

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

    def as_dict(self, mode: str | None = None) -> EngineOptions:
        """Collect (local options, global options) of this section and those below, for ``mode``."""
        mode = mode or MAX_AUTOTUNE
        collected: EngineOptions = ({}, {})
        for name, member in self.declared.items():
            if isinstance(member, OptionValue):
                self._emit(member, mode, collected)
            elif isinstance(current := vars(self)[name], Section):
                for into, found in zip(collected, current.as_dict(mode), strict=True):
                    into.update(found)
        return collected

    def _emit(self, option: OptionValue, mode: str, collected: EngineOptions) -> None:
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
            if (value := emission.encode(raw)) is not None:
                target = local_options if emission.scope == "local" else global_options
                target[emission.key] = value


class OpenSection(Section):
    """A section that takes any name; assignment replaces the option object and checks nothing."""

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value


def raw_of(member: Any) -> Any:
    """The stored value of an option; any other object is its own value."""
    return member.raw if isinstance(member, OptionValue) else member


def leaves(section: Section | PlainSection, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, raw value) of everything below ``section``, in declaration order."""
    for name, member in vars(section).items():
        if isinstance(member, Section | PlainSection):
            yield from leaves(member, f"{prefix}{name}.")
        else:
            yield prefix + name, raw_of(member)


def given(config: Any, kind: type[S]) -> S:
    """What a user passed as configuration, a fresh one for None; TypeError for anything else."""
    if config is None:
        return kind()
    if isinstance(config, kind):
        return config
    if isinstance(config, type):
        raise TypeError(
            f"compiler_config is the class {config.__name__}: pass one made of it, "
            f"{config.__name__}()"
        )
    if isinstance(config, Mapping):
        raise TypeError(
            f"compiler_config is a {type(config).__name__}: make a CompilerConfig() and set its "
            "options as attributes, or pass the dict as torch.compile(..., options={...})"
        )
    raise TypeError(
        f"compiler_config is a {getattr(config, 'public_name', type(config).__name__)}, which is "
        f"not for this backend: it takes a {kind.public_name}"
    )


def read_path(section: Section, path: str) -> Any:
    """The raw value at a dotted path."""
    return raw_of(attrgetter(path)(section))


def write_path(section: Section, path: str, value: Any) -> None:
    """Assign to a dotted path, with the validation of the option that lives there."""
    parent, _, name = path.rpartition(".")
    setattr(attrgetter(parent)(section) if parent else section, name, value)
