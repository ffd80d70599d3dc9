"""`gpu-plugin events`: which of them are shown, how, and where no daemon answers."""

import json
import time
from datetime import UTC, datetime

import msgspec
import pytest

from gpu_plugin import cli
from gpu_plugin.cli.events import lines, moment
from gpu_plugin.runtime import control
from gpu_plugin.state.event_store import Event
from gpu_plugin.state.log import EVENT
from tests.state_log import store

NOW = datetime(2026, 11, 22, 14, 30, tzinfo=UTC).timestamp()
NIGHT = datetime(2026, 11, 22, 2, 40, tzinfo=UTC).timestamp()
EVENTS = [
    Event(NIGHT - 7200, "daemon", "gpu-plugin 1.0 started, process 7"),
    Event(NIGHT, "health", "Unhealthy: Xid 79", uuid="GPU-1", index=1, bus_id="0000:1b:00.0", xid=79),
    Event(
        NIGHT + 60,
        "order",
        "cordon: done.",
        uuid="GPU-1",
        index=1,
        bus_id="0000:1b:00.0",
        by="uid 0, process 9",
        reason="fan is loud",
    ),
]


@pytest.fixture
def daemon(monkeypatch):
    """The requests to a daemon with `EVENTS`."""
    asked = []

    def request(_state_dir, verb, **fields):
        asked.append((verb, fields))
        return {"events": msgspec.to_builtins(EVENTS), "left_out": 0}

    monkeypatch.setattr(control, "request", request)
    return asked


def run(capsys, *arguments):
    status = cli.main(["events", *arguments])
    told = capsys.readouterr()
    return status, told.out.splitlines(), told.err


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2h", NOW - 7200),
        ("90m", NOW - 5400),
        ("02:40", NIGHT),
        ("02:40:30", NIGHT + 30),
        ("14:30", NOW),
        ("23:00", datetime(2026, 11, 21, 23, tzinfo=UTC).timestamp()),  # not to come: the latest
        ("2026-11-22T02:40", NIGHT),
        ("2026-11-22 02:40:00Z", NIGHT),
        ("2026-11-22T03:40+01:00", NIGHT),
        ("2026-11-22", datetime(2026, 11, 22, tzinfo=UTC).timestamp()),
    ],
)
def test_a_time_is_said_as_people_say_it(text, time):
    assert moment(text, NOW) == time


@pytest.mark.parametrize(
    ("until", "since", "minutes"),
    [("03:00", NIGHT - 600, 30), ("02:40", NIGHT, 0), ("02:39", NIGHT, 24 * 60 - 1), ("01:00", NIGHT - 14400, 140)],
)
def test_a_time_of_day_that_ends_a_range_is_the_first_from_its_beginning_on(until, since, minutes):
    for now in (NIGHT + 300, NOW):
        assert moment(until, now, since) == since + minutes * 60


@pytest.mark.parametrize("until", ["2026-11-22T02:29", "2h"])
def test_a_range_without_a_time_in_it_is_bad_usage(capsys, daemon, until, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: NIGHT + 300)
    status, _, err = run(capsys, "--since", "02:30", f"--until={until}")
    assert (status, daemon) == (2, [])
    assert "--until is before --since" in err


@pytest.mark.parametrize("text", ["", "noon", "25:00", "7", "-2h", "2026-13-01"])
def test_what_is_no_time_is_refused(text, capsys, daemon):
    with pytest.raises(ValueError, match="is not a time such as"):
        moment(text, NOW)
    status, _, err = run(capsys, f"--since={text}")
    assert (status, daemon) == (2, [])
    assert "--since: " in err


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ((), [0, 1, 2]),
        (("--since", "2026-11-22T02:30"), [1, 2]),
        (("--since", "2026-11-22T02:30", "--until", "2026-11-22T02:40"), [1]),
        (("--kind", "order", "--kind", "daemon"), [0, 2]),
        (("-n", "1"), [2]),
        (("--kind", "configuration"), []),
    ],
)
def test_those_that_are_asked_for_are_shown(capsys, daemon, arguments, shown):
    expected = list(lines(msgspec.to_builtins([EVENTS[at] for at in shown])))
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (0, expected)
    assert bool(err) is not bool(shown)


def test_a_line_says_when_what_why_and_who():
    (line,) = lines(msgspec.to_builtins(EVENTS[2:]))
    assert line == "2026-11-22 02:41:00 UTC  order          cordon: done; reason: fan is loud; by uid 0, process 9"
    (cut,) = lines(msgspec.to_builtins([Event(NIGHT, "order", "cordon: refused for a long...", by="uid 0")]))
    assert cut.endswith("for a long...; by uid 0")


def test_structured_output_has_every_field(capsys, daemon):
    _, out, _ = run(capsys, "-o", "json", "--kind", "health")
    assert json.loads("\n".join(out)) == [{**msgspec.to_builtins(EVENTS[1]), "at": "2026-11-22T02:40:00.000Z"}]


def test_the_daemon_is_asked_for_a_gpu(capsys, daemon):
    run(capsys, "--gpu", "1b:00.0")
    assert daemon == [("events", {"gpu": "1b:00.0"})]


@pytest.mark.parametrize(("gpu", "shown"), [(None, 3), ("1", 2), ("1b:00.0", 2), ("GPU-1", 2), ("GPU-2", 0)])
def test_without_a_daemon_the_log_is_read(capsys, tmp_path, gpu, shown):
    for event in EVENTS:
        store(tmp_path, EVENT, event)
    which = [] if gpu is None else ["--gpu", gpu]
    status, out, err = run(capsys, "--state-dir", str(tmp_path), *which)
    assert (status, len(out)) == (3, shown)
    assert f"no daemon answers at {tmp_path}" in err
    assert f"these events are from the log in {tmp_path}" in err


def test_without_a_daemon_and_a_log_there_is_no_answer(capsys, tmp_path):
    status, out, err = run(capsys, "--state-dir", str(tmp_path))
    assert (status, out) == (3, [])
    assert "no daemon answers" in err
