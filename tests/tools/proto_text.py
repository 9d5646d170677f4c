"""The text of a `.proto` file as the descriptor that `protoc` makes of it: messages, enums, oneofs
and maps of proto3, no options. As a program it writes the descriptor that the package ships."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2

FOLDER = Path(__file__).parents[2] / "src/torchair/serde"
_TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"[^"]*"|[A-Za-z_][\w.]*|\d+|[^\s\w]', re.DOTALL)
_SCALARS = ("double", "float", "int64", "uint64", "int32", "uint32", "bool", "string", "bytes")


def parse(text: str, name: str) -> Any:
    """The FileDescriptorProto of a proto3 text."""
    return _Parser(text).file(descriptor_pb2.FileDescriptorProto(name=name, syntax="proto3"))


class _Parser:
    """Recursive descent over the words of the text; each method eats what it is named after."""

    def __init__(self, text: str) -> None:
        words = _TOKEN.findall(text)
        self.words = [w for w in words if not w.startswith(("//", "/*"))]
        self.words.reverse()

    def file(self, file: Any) -> Any:
        while self.words:
            word = self.next()
            if word == "message":
                self.message(file.message_type.add())
            elif word == "enum":
                self.enum(file.enum_type.add())
            elif word == "package":
                file.package = self.next()
            else:
                self.expect_syntax(word)
        return file

    def expect_syntax(self, word: str) -> None:
        if word == ";":
            return
        if [word, self.next(), self.next()] != ["syntax", "=", '"proto3"']:
            raise ValueError(f"unexpected {word!r} in a proto file")

    def next(self) -> str:
        return self.words.pop()

    def take(self, expected: str) -> None:
        word = self.next()
        if word != expected:
            raise ValueError(f"expected {expected!r} in a proto file, found {word!r}")

    def block(self) -> Any:
        """First words of the members between braces."""
        self.take("{")
        while (word := self.next()) != "}":
            yield word

    def enum(self, enum: Any) -> None:
        enum.name = self.next()
        for name in self.block():
            self.take("=")
            enum.value.add(name=name, number=int(self.next()))
            self.take(";")

    def message(self, message: Any) -> None:
        message.name = self.next()
        for word in self.block():
            if word == "message":
                self.message(message.nested_type.add())
            elif word == "enum":
                self.enum(message.enum_type.add())
            elif word == "oneof":
                self.oneof(message)
            else:
                self.field(message, word)

    def oneof(self, message: Any) -> None:
        index = len(message.oneof_decl)
        message.oneof_decl.add(name=self.next())
        for word in self.block():
            self.field(message, word).oneof_index = index

    def field(self, message: Any, word: str) -> Any:
        """One field; a map becomes a repeated entry message, as the format defines it."""
        repeated = word in ("repeated", "map")
        kind = self.map_entry(message) if word == "map" else self.next() if repeated else word
        field = message.field.add(name=self.next(), label=3 if repeated else 1)
        if word == "map":
            entry = message.nested_type[-1]
            kind = entry.name = field.name.title().replace("_", "") + "Entry"
        self.take("=")
        field.number = int(self.next())
        self.take(";")
        _set_type(field, kind)
        return field

    def map_entry(self, message: Any) -> str:
        self.take("<")
        entry = message.nested_type.add()
        entry.options.map_entry = True
        for number, name, end in ((1, "key", ","), (2, "value", ">")):
            _set_type(entry.field.add(name=name, number=number, label=1), self.next())
            self.take(end)
        return ""


def _set_type(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = field.Type.Value(f"TYPE_{kind.upper()}")
    else:
        field.type_name = kind  # the pool finds out whether it is a message or an enum


def descriptor_set(file: Path) -> bytes:
    """The bytes of a descriptor set with one file."""
    made = parse(file.read_text("utf-8"), f"torchair/serde/{file.name}")
    return descriptor_pb2.FileDescriptorSet(file=[made]).SerializeToString(deterministic=True)


if __name__ == "__main__":
    (FOLDER / "ge_ir.desc").write_bytes(descriptor_set(FOLDER / "ge_ir.proto"))
