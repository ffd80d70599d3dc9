import json
import logging
import re

import pytest

from gpu_plugin.telemetry import logs


@pytest.fixture
def err(capsys):
    """Standard error; levels and handlers are put back afterwards."""
    loggers = [logging.getLogger(name) for name in (None, *logs._CHATTY)]
    levels = [logger.level for logger in loggers]
    yield capsys
    for handler in loggers[0].handlers[:]:
        if type(handler) is logging.StreamHandler:
            loggers[0].removeHandler(handler)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def lines(err):
    return err.readouterr().err.splitlines()


def test_text_has_time_level_and_message(err):
    logs.configure("text", "info")
    logging.getLogger("gpu_plugin.test").warning("GPU %s is lost", "GPU-1")
    (line,) = lines(err)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING GPU GPU-1 is lost", line)


def test_json_has_time_level_and_message_on_one_line(err):
    logs.configure("json", "info")
    logging.getLogger("gpu_plugin.test").error('GPU %s: "Ω"\nlost', "GPU-1")
    (line,) = lines(err)
    content = json.loads(line)
    assert content.keys() == {"time", "level", "logger", "message"}
    assert (content["level"], content["logger"]) == ("ERROR", "gpu_plugin.test")
    assert content["message"] == 'GPU GPU-1: "Ω"\nlost'
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}", content["time"])


def test_json_keeps_a_trace_on_the_line(err):
    logs.configure("json", "info")
    try:
        _ = 1 // 0
    except ZeroDivisionError:
        logging.getLogger("gpu_plugin.test").exception("failed")
    (line,) = lines(err)
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
def test_a_level_lets_itself_and_worse_through(err, form, level, said):
    logs.configure(form, level)
    for name in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger("gpu_plugin.test"), name)("said at %s", name)
    assert [name for line in lines(err) for name in ("DEBUG", "INFO", "WARNING", "ERROR") if name in line] == said


@pytest.mark.parametrize(
    ("level", "heard"), [("debug", ["INFO", "WARNING"]), ("info", ["WARNING"]), ("warning", ["WARNING"]), ("error", [])]
)
@pytest.mark.parametrize("library", ["grpclib.server", "asyncio", "hpack.hpack", "h2"])
def test_what_libraries_say_of_every_request_is_our_debugging(err, library, level, heard):
    logs.configure("json", level)
    for name in ("debug", "info", "warning"):
        getattr(logging.getLogger(library), name)("said")
    assert [json.loads(line)["level"] for line in lines(err)] == heard


def test_configured_anew_it_says_everything_once_and_in_the_new_form(err):
    logs.configure("text", "debug")
    logs.configure("json", "info")
    logging.getLogger("gpu_plugin.test").info("once")
    logging.getLogger("gpu_plugin.test").debug("not at all")
    (line,) = lines(err)
    assert json.loads(line)["message"] == "once"


@pytest.mark.parametrize("level", ["loud", ""])
def test_a_level_that_is_none_is_refused(err, level):
    with pytest.raises(KeyError):
        logs.configure("text", level)
