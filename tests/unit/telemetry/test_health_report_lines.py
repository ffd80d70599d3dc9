import logging

import pytest

from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.latch import Transition, Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import Facts, Fault, Sample, XidEvent
from gpu_plugin.health.policy import HealthPolicy, XidPolicy
from gpu_plugin.health.xid_table import XID_TABLE
from gpu_plugin.telemetry.health_reports import REPEAT_LOG, RepeatedXids, tell
from tests.unit.telemetry.test_logs import documented_fields

OK, APP, DEGRADED, FATAL = Verdict


def said(caplog):
    return [(record.levelno, record.getMessage()) for record in caplog.records]


@pytest.mark.parametrize(
    ("change", "level", "line"),
    [
        (
            Transition("GPU-1", "xid", FATAL, OK, "Xid 79 (off the bus)", 1.0, xid=79, action="reset it"),
            logging.ERROR,
            "GPU GPU-1 is Unhealthy: Xid 79 (off the bus) (signal xid); to do: reset it",
        ),
        (
            Transition("GPU-1", "nvlink", DEGRADED, OK, "NVLink 5 is down", 1.0),
            logging.WARNING,
            "GPU GPU-1 is degraded: NVLink 5 is down (signal nvlink)",
        ),
        (
            Transition("GPU-1", "xid", FATAL, DEGRADED, "Xid 48", 1.0, "MIG-1", 48),
            logging.ERROR,
            "MIG device MIG-1 of GPU GPU-1 is Unhealthy: Xid 48 (signal xid)",
        ),
        (
            Transition("GPU-1", "xid", DEGRADED, FATAL, "Xid 48", 1.0),
            logging.WARNING,
            "GPU GPU-1 is degraded: Xid 48 (signal xid); it is Healthy again",
        ),
        (
            Transition("GPU-1", "xid", DEGRADED, FATAL, "Xid 48", 1.0, standing=FATAL),
            logging.WARNING,
            "GPU GPU-1 is degraded: Xid 48 (signal xid)",
        ),
        (
            Transition("GPU-1", "xid", APP, OK, "Xid 31 (page fault)", 1.0),
            logging.INFO,
            "GPU GPU-1: Xid 31 (page fault) is an application's own error; the GPU stays as it is",
        ),
        (
            Transition("GPU-1", "temperature", OK, FATAL, "94 °C", 1.0),
            logging.INFO,
            "GPU GPU-1: over: 94 °C (signal temperature); it is Healthy again",
        ),
        (
            Transition("GPU-1", "temperature", OK, FATAL, "94 °C", 1.0, "MIG-1", standing=FATAL),
            logging.INFO,
            "MIG device MIG-1 of GPU GPU-1: over: 94 °C (signal temperature)",
        ),
        (
            Transition("GPU-1", "clocks", OK, DEGRADED, "", 1.0),
            logging.INFO,
            "GPU GPU-1: over: clocks (signal clocks)",
        ),
        (
            Transition("GPU-1", "cordon", FATAL, OK, "cordoned: fan is loud", 1.0, action="uncordon"),
            logging.INFO,
            "GPU GPU-1 is Unhealthy: held back by its operator (cordoned: fan is loud)",
        ),
        (
            Transition("GPU-1", "maintenance", OK, FATAL, "maintenance", 1.0),
            logging.INFO,
            "GPU GPU-1: no longer held back by its operator (maintenance); it is Healthy again",
        ),
        (
            Transition("GPU-1", "cordon", OK, FATAL, "cordoned", 1.0, standing=FATAL),
            logging.INFO,
            "GPU GPU-1: no longer held back by its operator (cordoned); it stays Unhealthy",
        ),
        (
            Transition("GPU-1", "xid", APP, FATAL, "Xid 31 (page fault)", 1.0, standing=APP),
            logging.INFO,
            "GPU GPU-1: Xid 31 (page fault) is an application's own error; it is Healthy again",
        ),
    ],
)
def test_a_change_of_verdict_is_one_line_as_loud_as_it_is_bad(caplog, change, level, line):
    caplog.set_level(logging.INFO)
    tell(change)
    assert said(caplog) == [(level, line)]


@pytest.mark.parametrize(
    "seen",
    [
        XidEvent(79),
        XidEvent(48),
        XidEvent(74),
        Sample(counting=0, recovery_action=4),
        Sample(fault=Fault.HUNG, detail="no answer"),
    ],
)
def test_the_line_of_a_fault_is_short_and_names_its_gpu_once(caplog, seen):
    uuid = "GPU-6f1c3a52-0d5e-4f0b-9c57-8a1e2b3c4d5e"
    ledger = HealthLedger(HealthPolicy(XidPolicy(XID_TABLE)))
    ledger.watch(uuid, Facts())
    (change,) = ledger.observe(uuid, seen, 1.0)
    tell(change)
    (message,) = (text for _, text in said(caplog))
    assert len(message) < 225
    assert message.count(uuid) <= 2
    assert "gpu-plugin" not in message
    assert f"signal {change.signal}" in message


def test_a_line_names_the_gpu_as_everywhere_and_says_what_it_is_about_as_fields(caplog):
    caplog.set_level(logging.INFO)
    gpus = (Gpu("GPU-0", 0), Gpu("GPU-1", 3, pci_bus_id="00000000:1B:00.0"))
    tell(Transition("GPU-1", "xid", FATAL, OK, "Xid 48", 1.0, "MIG-1", 48), gpus)
    tell(Transition("GPU-1", "temperature", DEGRADED, OK, "94 °C", 1.0), gpus)
    RepeatedXids(Clock()).count("GPU-1", 31, "page fault", APP, gpus)
    names = ("uuid", "mig_device", "signal", "verdict", "xid")
    assert [tuple(getattr(record, name, None) for name in names) for record in caplog.records] == [
        ("GPU-1", "MIG-1", "xid", "FATAL", 48),
        ("GPU-1", None, "temperature", "DEGRADED", None),
        ("GPU-1", None, "xid", "APP", 31),
    ]
    assert set(names) <= documented_fields()
    assert [text.count("GPU 3 (0000:1b:00.0, GPU-1)") for _, text in said(caplog)] == [1, 1, 1]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_an_xid_raised_by_the_hundred_is_said_once_a_minute_with_how_many_there_were(caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    repeated = RepeatedXids(clock)
    for _ in range(300):
        repeated.count("GPU-1", 31, "page fault", APP)
        clock.now += 0.01
    repeated.count("GPU-2", 31, "page fault", APP)
    assert len(caplog.records) == 2
    clock.now += REPEAT_LOG
    repeated.count("GPU-1", 31, "page fault", APP)
    assert "(299 more since the last log line)" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 3


def test_what_a_change_of_verdict_told_of_is_not_said_again_at_once(caplog):
    clock = Clock()
    repeated = RepeatedXids(clock)
    repeated.told("GPU-1", 79)
    for _ in range(5):
        repeated.count("GPU-1", 79, "off the bus", FATAL)
    assert caplog.records == []
    clock.now += REPEAT_LOG
    repeated.count("GPU-1", 79, "off the bus", FATAL)
    assert [(record.levelno, "5 more" in record.getMessage()) for record in caplog.records] == [(logging.WARNING, True)]


def test_what_the_policy_ignores_is_called_nobodys_error(caplog):
    caplog.set_level(logging.INFO)
    RepeatedXids(Clock()).count("GPU-1", 79, "off the bus", OK)
    assert "is ignored by the Xid policy; the GPU stays as it is" in caplog.text
    assert "application" not in caplog.text
