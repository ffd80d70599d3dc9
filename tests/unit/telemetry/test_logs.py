import ast
import json
import logging
import re
from pathlib import Path

import pytest

from gpu_plugin.devices.node import Gpu
from gpu_plugin.telemetry import logs


def lines(capsys):
    logging.getLogger().handlers[-1].flush()
    return capsys.readouterr().err.splitlines()


def test_text_has_time_level_and_message(capsys):
    logs.configure("text", "info")
    logging.getLogger("gpu_plugin.test").warning("GPU %s is lost", "GPU-1")
    (line,) = lines(capsys)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING GPU GPU-1 is lost", line)


def test_json_has_time_level_and_message_on_one_line(capsys):
    logs.configure("json", "info")
    logging.getLogger("gpu_plugin.test").error('GPU %s: "Ω"\nlost', "GPU-1")
    (line,) = lines(capsys)
    content = json.loads(line)
    assert content.keys() == {"time", "level", "logger", "message"}
    assert (content["level"], content["logger"]) == ("ERROR", "gpu_plugin.test")
    assert content["message"] == 'GPU GPU-1: "Ω"\nlost'
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", content["time"])


def test_json_keeps_a_trace_on_the_line(capsys):
    logs.configure("json", "info")
    try:
        _ = 1 // 0
    except ZeroDivisionError:
        logging.getLogger("gpu_plugin.test").exception("failed")
    (line,) = lines(capsys)
    content = json.loads(line)
    assert content["message"] == "failed"
    assert "ZeroDivisionError" in content["exc_info"]


@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("debug", ["DEBUG", "INFO", "WARNING", "ERROR"]),
        ("info", ["INFO", "WARNING", "ERROR"]),
        ("warning", ["WARNING", "ERROR"]),
        ("error", ["ERROR"]),
        ("INFO", ["INFO", "WARNING", "ERROR"]),
    ],
)
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_level_lets_itself_and_worse_through(capsys, form, level, said):
    logs.configure(form, level)
    for name in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger("gpu_plugin.test"), name)("said at %s", name)
    assert [name for line in lines(capsys) for name in ("DEBUG", "INFO", "WARNING", "ERROR") if name in line] == said


@pytest.mark.parametrize(
    ("libraries", "level", "heard"),
    [
        (("grpclib.client", "asyncio", "hpack.hpack", "h2"), "debug", ["INFO", "WARNING"]),
        (("grpclib.client", "asyncio", "hpack.hpack", "h2"), "info", ["WARNING"]),
        (("grpclib.server",), "debug", ["WARNING"]),  # a line for each request that a peer cancels
        (("grpclib.client", "asyncio", "hpack.hpack", "h2", "grpclib.server"), "warning", ["WARNING"]),
        (("grpclib.client", "asyncio", "hpack.hpack", "h2", "grpclib.server"), "error", []),
    ],
)
def test_lines_of_libraries_about_each_request_are_debugging(capsys, libraries, level, heard):
    logs.configure("json", level)
    for library in libraries:
        for name in ("debug", "info", "warning"):
            getattr(logging.getLogger(library), name)("said")
    assert [json.loads(line)["level"] for line in lines(capsys)] == heard * len(libraries)


def test_configured_again_it_says_everything_once_and_in_the_new_form(capsys):
    logs.configure("text", "debug")
    logs.configure("json", "info")
    logging.getLogger("gpu_plugin.test").info("once")
    logging.getLogger("gpu_plugin.test").debug("not at all")
    (line,) = lines(capsys)
    assert json.loads(line)["message"] == "once"


@pytest.mark.parametrize("level", ["loud", ""])
def test_a_level_that_is_none_is_refused(capsys, level):
    with pytest.raises(KeyError):
        logs.configure("text", level)


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_a_peer_puts_into_a_message_begins_no_line_and_reaches_no_terminal(capsys, form):
    logs.configure(form, "info")
    forged = "no\r\n2026-11-22T02:40:13.123Z ERROR   GPU 0\x1b[2J\x9b1m\u2028\x7f"
    logging.getLogger("gpu_plugin.test").info("the kubelet refused: %s", forged)
    (line,) = lines(capsys)
    assert not re.search(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028]", line)
    if form == "text":
        assert line.endswith("refused: no\\r\\n2026-11-22T02:40:13.123Z ERROR   GPU 0\\x1b[2J\\x9b1m\\u2028\\x7f")
    else:
        assert json.loads(line)["message"] == f"the kubelet refused: {forged}"


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_name_that_is_no_utf_8_is_a_line_all_the_same(capsys, form):
    logs.configure(form, "info")
    logging.getLogger("gpu_plugin.test").info("%s is no config", "a\udcffb", extra={"device": "\udc80"})
    (line,) = lines(capsys)
    assert (
        "a\\udcffb is no config" in line if form == "text" else json.loads(line)["message"] == "a\\udcffb is no config"
    )
    if form == "json":
        assert json.loads(line)["device"] == "\\udc80"


def test_a_trace_is_indented_and_as_harmless(capsys):
    logs.configure("text", "info")
    try:
        raise ValueError("no\n2026-11-22T02:40:13.123Z ERROR   forged\x1b[2J")
    except ValueError:
        logging.getLogger("gpu_plugin.test").exception("failed")
    first, *trace = lines(capsys)
    assert first.endswith(" ERROR   failed")
    assert trace
    assert all(line.startswith("    ") and "\x1b" not in line for line in trace)


def test_fields_of_a_line_are_beside_its_message_and_name_the_gpu_in_full(capsys):
    logs.configure("json", "info")
    logs.know([Gpu("GPU-1", 3, pci_bus_id="00000000:1B:00.0")])  # as NVML spells it
    log = logging.getLogger("gpu_plugin.test")
    log.warning("GPU 3 is Unhealthy", extra={"uuid": "GPU-1", "xid": 79, "verdict": "FATAL"})
    log.info("unknown", extra={"uuid": "GPU-2"})
    known, unknown = map(json.loads, lines(capsys))
    assert {name: known[name] for name in ("uuid", "index", "bus_id", "xid", "verdict")} == {
        "uuid": "GPU-1",
        "index": 3,
        "bus_id": "0000:1b:00.0",
        "xid": 79,
        "verdict": "FATAL",
    }
    assert (unknown["uuid"], unknown.keys() & {"index", "bus_id"}) == ("GPU-2", set())


def documented_fields():
    """Return the fields of log lines that docs/command-line.md lists."""
    section = Path("docs/command-line.md").read_text(encoding="utf-8").partition("## Logs\n")[2]
    return {name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}


def test_every_field_that_is_logged_is_one_that_is_documented():
    source = Path(logs.__file__).parents[1]
    used = {
        key.value
        for file in source.rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.keyword) and call.arg == "extra" and isinstance(call.value, ast.Dict)
        for key in call.value.keys
        if isinstance(key, ast.Constant)
    }
    assert used
    assert used | {"index", "bus_id"} <= documented_fields()
