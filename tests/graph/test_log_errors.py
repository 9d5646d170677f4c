"""Error texts and classes, the error code line, log lines and levels, environment flags."""

from __future__ import annotations

import logging
import os
import pickle
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from torchair import errors
from torchair.errors import ConversionError, InputError, TorchairError, pretty_error_msg
from torchair.flags import Flags
from torchair.ge.graph import Origin
from torchair.log import (
    EVENT_LEVEL,
    add_debug_file,
    follow_environment,
    logger,
    native_logger,
    npugraph_ex_logger,
    warn_once,
)

SOURCE = Path(__file__).resolve().parents[2] / "src"

CODE_LINE = re.compile(
    r"^\[ERROR\] \d{4}-\d\d-\d\d-\d\d:\d\d:\d\d "
    rf"\(PID:{os.getpid()}, Device:-1, RankID:-1\) ERR03005 GRAPH internal error$",
    re.MULTILINE,
)
PREFIX = rf"TORCHAIR\({os.getpid()},{re.escape(os.path.basename(sys.executable))}\)"
COMPILER_LINE = re.compile(
    rf"^\[(\w+)\] {PREFIX}:\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{{3}}\.\d{{3}} "
    r"\[([\w.]+):(\d+)\](\d+) (.*)$"
)
NATIVE_LINE = re.compile(
    rf"^\[(\w+)\] {PREFIX}:\d{{4}}-\d\d-\d\d-\d\d:\d\d:\d\d\.\d{{3}}\.\d{{3}} "
    r"\[([\w./]+):(\d+)\](\d+) (.*)$"
)


@pytest.fixture
def at_level():
    """Set levels for one test; both loggers get theirs back."""
    before = {owner: owner.level for owner in (logger, native_logger)}
    yield lambda owner, level: owner.setLevel(level)
    for owner, level in before.items():
        owner.setLevel(level)


# ---- error classes


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("UnsupportedModeError", ValueError),
        ("ConversionError", RuntimeError),
        ("GraphError", RuntimeError),
        ("ScopeError", RuntimeError),
        ("SerializationError", ValueError),
        ("EngineOptionError", ValueError),
        ("InputError", RuntimeError),
        ("MissingHostValue", RuntimeError),
    ],
)
def test_errors_are_builtins_and_rebuild_from_one_string(name, builtin):
    error = getattr(errors, name)("the headline")
    assert isinstance(error, builtin) and isinstance(error, TorchairError)
    assert str(error) == "the headline"
    assert str(pickle.loads(pickle.dumps(error))) == "the headline"


def test_conversion_error_teaches():
    error = ConversionError(
        "no converter for this overload",
        op="aten.add.Scalar",
        schema="aten::add.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor",
        source='File "model.py", line 7, in forward    return x + 1',
        overloads=["aten.add.Tensor"],
    )
    assert str(error).splitlines() == [
        "no converter for this overload",
        "  op: aten.add.Scalar",
        "  schema: aten::add.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor",
        '  called from: File "model.py", line 7, in forward    return x + 1',
        "  overloads with a converter: aten.add.Tensor",
        "  what to do: write a converter and register it with "
        "@torchair.register_fx_node_ge_converter(torch.ops.aten.add.Scalar)",
    ]


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (
            errors.UnsupportedModeError("cannot compile", mode="fast", supported=["a", "b"]),
            ["mode: 'fast'", "supported: a, b"],
        ),
        (errors.GraphError("cycle", node="Add_1", graph="graph_1"), ["node: Add_1"]),
        (errors.ScopeError("nested", scope="s1", hint="close it"), ["what to do: close it"]),
        (
            errors.SerializationError("bad tag", file=Path("a.air"), position=0),
            ["file: a.air", "position: 0"],
        ),
        (
            errors.EngineOptionError("already started", differences={"ge.x": ("0", "1")}),
            ["ge.x: '0' is in force, '1' was asked for"],
        ),
        (
            InputError("wrong shape", index=0, name="x", expected=[2, 3], got=[2, 4]),
            ["input: 0", "name: x", "expected: [2, 3]", "got: [2, 4]"],
        ),
        (errors.MissingHostValue("axis unknown", value="Shape_0:0"), ["value: Shape_0:0"]),
    ],
)
def test_errors_name_their_facts(error, lines):
    for line in lines:
        assert f"\n  {line}" in str(error)


def test_long_lists_are_cut():
    error = ConversionError("x", overloads=[f"aten.f.o{i}" for i in range(30)])
    assert "aten.f.o11 and 18 more" in str(error)
    assert len(error.overloads) == 30


# ---- pretty_error_msg


class NeedsTwo(Exception):
    def __init__(self, code, text):
        super().__init__(code, text)


class DropsText(Exception):
    def __init__(self, code):
        super().__init__(f"code {len(code)}")


@pretty_error_msg
def failing(error):
    raise error


@pretty_error_msg
def failing_outer(error):
    """Calls a decorated function."""
    return failing(error)


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, NotImplementedError, KeyError, OSError])
def test_explained_error_keeps_its_class(kind):
    original = kind("bad option")
    with pytest.raises(kind) as caught:
        failing(original)
    assert type(caught.value) is kind
    assert caught.value.__cause__ is original
    assert len(caught.value.args) == 1
    text = caught.value.args[0]
    assert text.startswith(f"{original}\n")
    assert "Traceback (most recent call last):" in text and "in failing" in text
    assert CODE_LINE.search(text).end() == len(text)


def test_nested_functions_explain_once():
    with pytest.raises(ValueError) as caught:
        failing_outer(ValueError("bad option"))
    assert len(CODE_LINE.findall(str(caught.value))) == 1
    assert failing_outer.__doc__ == "Calls a decorated function."


@pytest.mark.parametrize("original", [NeedsTwo(3, "text"), DropsText("abc")])
def test_error_that_cannot_hold_one_string_gets_one_note(original):
    with pytest.raises(type(original)) as caught:
        failing_outer(original)
    assert caught.value is original
    (note,) = original.__notes__
    assert CODE_LINE.search(note)


def test_explained_error_keeps_its_facts():
    with pytest.raises(InputError) as caught:
        failing(InputError("wrong shape", index=2, expected=[1], got=[2]))
    assert (caught.value.index, caught.value.expected) == (2, [1])
    assert str(caught.value).count("expected: [1]") == 1


def test_values_and_interrupts_pass_untouched():
    assert pretty_error_msg(lambda value: value + 1)(1) == 2
    interrupt = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt) as caught:
        failing(interrupt)
    assert caught.value is interrupt and not hasattr(interrupt, "__notes__")


def test_code_line_names_the_rank(monkeypatch):
    class Distributed:
        is_available = is_initialized = staticmethod(lambda: True)
        get_world_size, get_rank = staticmethod(lambda: 8), staticmethod(lambda: 5)

    monkeypatch.setitem(sys.modules, "torch.distributed", Distributed)
    with pytest.raises(ValueError, match="RankID:5"):
        failing(ValueError("x"))


# ---- the compiler's logger


def here():
    return sys._getframe(1).f_lineno


@pytest.mark.parametrize(
    ("method", "level"), [("info", "INFO"), ("event", "EVENT"), ("warning_once", "WARNING")]
)
def test_line_layout(capsys, at_level, method, level):
    at_level(logger, logging.DEBUG)
    line_number = here() + 1
    getattr(logger, method)("layout of %s", method)
    captured = capsys.readouterr()
    match = COMPILER_LINE.match(captured.out.rstrip("\n"))
    assert match, captured.out
    assert match.groups()[:3] == (level, "test_log_errors.py", str(line_number))
    assert match[4] == str(threading.main_thread().native_id)
    assert match[5] == f"layout of {method}"
    assert captured.err == ""


def test_event_level_shows_events_and_errors(capsys, at_level):
    at_level(logger, EVENT_LEVEL)
    for method in ("debug", "info", "warning", "event", "error"):
        getattr(logger, method)(method)
    shown = [COMPILER_LINE.match(line)[5] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["event", "error"]
    assert logging.getLevelName(EVENT_LEVEL) == "EVENT" and EVENT_LEVEL == 35


def test_levels_are_those_of_before_when_debugging_ends(monkeypatch, at_level):
    monkeypatch.setenv("TORCH_COMPILE_DEBUG", "0")
    follow_environment()
    at_level(logger, logging.INFO)
    at_level(npugraph_ex_logger, logging.WARNING)
    for value, levels in (("1", ["DEBUG", "DEBUG"]), ("0", ["INFO", "WARNING"])):
        monkeypatch.setenv("TORCH_COMPILE_DEBUG", value)
        follow_environment()
        found = [logging.getLevelName(x.level) for x in (logger, npugraph_ex_logger)]
        assert found == levels


def test_warning_once_counts_only_what_was_shown(capsys, at_level):
    at_level(logger, logging.ERROR)
    logger.warning_once("said once, please")
    at_level(logger, logging.WARNING)
    logger.warning_once("said once, please")
    logger.warning_once("said %s, please", "once")
    logger.warning_once("100% another text")
    shown = [COMPILER_LINE.match(line)[5] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["said once, please", "100% another text"]


def test_python_warnings_are_issued_once():
    def tell(text):
        warn_once(text, stacklevel=2)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for text in ("first", "first", "second"):
            tell(text)
            with warnings.catch_warnings():  # Python forgets what it has shown
                warnings.simplefilter("always")
        tell("first")
    assert [str(w.message) for w in seen] == ["first", "second"]
    assert {w.filename for w in seen} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):  # an error has not been shown
            with pytest.raises(UserWarning, match="third"):
                tell("third")


@pytest.mark.parametrize(
    "line, plain",
    [
        ('"m.py", line 3, in f    x + y           ^^^^^', '"m.py", line 3, in f    x + y'),
        ('"m.py", line 3, in f    x ^ ~y    ~~^~~~', '"m.py", line 3, in f    x ^ ~y'),
        ("add(    ^^^^        x,        ~~        y)        ^", "add(        x,        y)"),
        ("    ^^^^^", ""),
        ('"m.py", line 3, in f', '"m.py", line 3, in f'),
    ],
)
def test_source_lines_have_no_marks(line, plain):
    assert errors.without_marks(line) == plain
    assert Origin(f"# File {line}").line == (plain or "unknown source line")


def test_root_handlers_do_not_double_lines(capsys, at_level):
    at_level(logger, logging.ERROR)
    root_handler = logging.StreamHandler(sys.stdout)
    logging.getLogger().addHandler(root_handler)
    try:
        logger.error("only one line")
    finally:
        logging.getLogger().removeHandler(root_handler)
    assert capsys.readouterr().out.count("only one line") == 1


def test_the_root_logger_gets_every_line(caplog, capsys, at_level):
    at_level(logger, logging.INFO)
    logger.info("for %s", "everyone")
    npugraph_ex_logger.error("from the other")
    seen = [(r.name, r.getMessage()) for r in caplog.records]
    assert seen == [("torchair", "for everyone"), ("npugraph_ex", "from the other")]
    assert capsys.readouterr().out.count("everyone") == 1


def test_torch_logs_prints_once():
    code = (
        "import torch, torchair\ntorch.compile(lambda x: x + 1, backend='torchair')(torch.ones(2))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "TORCH_LOGS": "torchair"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout + done.stderr).count("compiler inputs") == 1


def test_other_loggers_stay_plain():
    assert logging.getLogger("torchair") is logger
    assert type(logging.getLogger("an.unrelated.logger")) is logging.getLoggerClass()
    assert not hasattr(logging.getLogger("an.unrelated.logger"), "event")


# ---- the native logger


def test_native_lines_go_to_stderr_with_a_prefix_each(capsys, at_level):
    at_level(native_logger, logging.INFO)
    native_logger.info("first\nsecond")
    captured = capsys.readouterr()
    matches = [NATIVE_LINE.match(line) for line in captured.err.splitlines()]
    assert [match[5] for match in matches] == ["first", "second"]
    assert captured.out == ""


def fresh_levels(**environment):
    """Level names of both loggers, and what each shows, in a process with this environment."""
    code = (
        "import logging\n"
        "from torchair.log import logger, native_logger\n"
        "print(logging.getLevelName(logger.level))\n"
        "print(logging.getLevelName(native_logger.level))\n"
        "for method in ('debug', 'info', 'warning', 'event', 'error'):\n"
        "    getattr(native_logger, method)(method)\n"
    )
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TORCH_COMPILE_DEBUG", "TNG_LOG_LEVEL", "TORCHAIR_DEBUG")
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, "PYTHONPATH": str(SOURCE), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    native = [line for line in done.stderr.splitlines() if "TORCHAIR(" in line]
    return done.stdout.split(), [line.rpartition(" ")[2] for line in native], done.stderr


@pytest.mark.parametrize(
    ("environment", "levels", "shown"),
    [
        ({}, ["ERROR", "ERROR"], ["error"]),
        ({"TORCH_COMPILE_DEBUG": "True"}, ["ERROR", "ERROR"], ["error"]),
        (
            {"TORCH_COMPILE_DEBUG": "1"},
            ["DEBUG", "DEBUG"],
            ["debug", "info", "warning", "error"],
        ),
        ({"TORCH_COMPILE_DEBUG": "1", "TNG_LOG_LEVEL": "3"}, ["DEBUG", "ERROR"], ["error"]),
        ({"TNG_LOG_LEVEL": "0"}, ["ERROR", "DEBUG"], ["debug", "info", "warning", "error"]),
        ({"TNG_LOG_LEVEL": "1"}, ["ERROR", "INFO"], ["info", "warning", "error"]),
        ({"TNG_LOG_LEVEL": "2"}, ["ERROR", "WARNING"], ["warning", "error"]),
        ({"TNG_LOG_LEVEL": "4"}, ["ERROR", "EVENT"], ["event", "error"]),
        ({"TNG_LOG_LEVEL": "loud"}, ["ERROR", "ERROR"], ["error"]),
    ],
)
def test_levels_from_the_environment(environment, levels, shown):
    found_levels, found_shown, stderr = fresh_levels(**environment)
    assert found_levels == levels
    assert found_shown == shown
    assert ("'loud'" in stderr) == ("loud" in environment.values())


# ---- the debug file


def test_debug_file_holds_both_loggers_once(tmp_path, capsys, at_level):
    at_level(logger, logging.INFO)
    at_level(native_logger, logging.INFO)
    file = tmp_path / "torchair" / "debug.log"
    stop = add_debug_file(file)
    try:
        add_debug_file(file)()  # known already: neither added nor stopped by this
        logger.info("from the compiler")
        native_logger.info("from the engine")
    finally:
        stop()
    logger.info("afterwards")
    first, second = file.read_text().splitlines()
    assert COMPILER_LINE.match(first)[5] == "from the compiler"
    assert NATIVE_LINE.match(second)[5] == "from the engine"
    assert "from the compiler" in capsys.readouterr().out


# ---- flags


def test_flags_defaults_and_values():
    assert Flags.read({}) == Flags()
    environment = {
        "TORCH_COMPILE_DEBUG": "1",
        "TNG_LOG_LEVEL": "2",
        "TORCHAIR_CACHE_HOME": "caches",
        "TORCHAIR_DEBUG": "3",
    }
    wanted = Flags(compile_debug=True, native_log_level="2", cache_home="caches", debug=3)
    assert Flags.read(environment) == wanted
    assert not Flags.read({"TORCH_COMPILE_DEBUG": "True"}).compile_debug
    for text, native in (("0", False), ("off", False), ("False", False), ("1", True), ("", True)):
        assert Flags.read({"TORCHAIR_NATIVE": text}).native is native
    with pytest.raises(ValueError, match=r"TORCHAIR_NATIVE is 'maybe': set it to one of 1, on,"):
        Flags.read({"TORCHAIR_NATIVE": "maybe"})


@pytest.mark.parametrize("text", ["6", "-1", "yes", "1.5"])
def test_flags_explain_a_bad_debug_level(text):
    with pytest.raises(ValueError, match=r"TORCHAIR_DEBUG is .* from 0 to 5"):
        Flags.read({"TORCHAIR_DEBUG": text})


def test_flags_are_frozen():
    with pytest.raises(AttributeError):
        Flags().debug = 1
