import logging

import pytest

from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.latch import Transition, Verdict
from gpu_plugin.telemetry.health_reports import REPEAT_LOG, RepeatedXids, tell
from tests.unit.telemetry.test_logs import documented_fields

OK, APP, DEGRADED, FATAL = Verdict


def said(caplog):
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def change(signal, verdict, previous, detail, device="", **more):
    return Transition("GPU-1", signal, verdict, previous, detail, 1.0, device, **more)


@pytest.mark.parametrize(
    ("change", "level"),
    [
        (change("xid", FATAL, OK, "Xid 79", xid=79), logging.ERROR),
        (change("nvlink", DEGRADED, OK, "NVLink 5 is down"), logging.WARNING),
        (change("xid", DEGRADED, FATAL, "Xid 48", others=FATAL), logging.WARNING),
        (change("xid", APP, OK, "Xid 31"), logging.INFO),
        (change("temperature", OK, FATAL, "94 °C", "MIG-1"), logging.INFO),
        (change("cordon", FATAL, OK, "cordoned: fan"), logging.INFO),
        (change("maintenance", OK, FATAL, "maintenance"), logging.INFO),
    ],
)
def test_a_change_of_verdict_is_one_line_with_a_level_for_its_severity(caplog, change, level):
    caplog.set_level(logging.INFO)
    tell(change)
    ((logged, line),) = said(caplog)
    assert logged == level
    assert line.startswith(f"MIG device {change.device} of GPU GPU-1" if change.device else "GPU GPU-1")
    assert change.detail in line


def test_the_line_of_a_fault_names_the_gpu_the_signal_and_the_remedy(caplog):
    tell(change("xid", FATAL, OK, "Xid 79 (off the bus)", xid=79, action="reset it"))
    ((level, line),) = said(caplog)
    assert level == logging.ERROR
    assert all(each in line for each in ("GPU GPU-1", "Xid 79 (off the bus)", "signal xid", "to do: reset it"))


def test_a_line_names_the_gpu_and_has_its_facts_as_fields(caplog):
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


def test_a_repeated_xid_is_logged_once_a_minute_with_its_count(caplog):
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


def test_an_xid_that_changed_a_verdict_is_not_logged_again_at_once(caplog):
    clock = Clock()
    repeated = RepeatedXids(clock)
    repeated.told("GPU-1", 79)
    for _ in range(5):
        repeated.count("GPU-1", 79, "off the bus", FATAL)
    assert caplog.records == []
    clock.now += REPEAT_LOG
    repeated.count("GPU-1", 79, "off the bus", FATAL)
    assert [(record.levelno, "5 more" in record.getMessage()) for record in caplog.records] == [(logging.WARNING, True)]


def test_an_ignored_xid_is_not_called_an_applications_error(caplog):
    caplog.set_level(logging.INFO)
    RepeatedXids(Clock()).count("GPU-1", 79, "off the bus", OK)
    assert "is ignored by the Xid policy; the GPU stays as it is" in caplog.text
    assert "application" not in caplog.text
