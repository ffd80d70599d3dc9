from gpu_plugin.health.latch import Transition, Verdict
from gpu_plugin.telemetry.health_reports import HealthReports


def change(uuid="GPU-1", signal="xid", verdict=Verdict.FATAL, since=1.0):
    return Transition(uuid, signal, verdict, Verdict.OK, "Xid 79", since, xid=79)


def test_changes_are_counted_by_gpu_signal_and_verdict():
    reports = HealthReports()
    for each in (change(), change(), change("GPU-0"), change(verdict=Verdict.OK), change(signal="temperature")):
        reports.report(each)
    assert list(reports.as_data()["transitions"]) == [
        {"uuid": "GPU-0", "signal": "xid", "verdict": "FATAL", "total": 1},
        {"uuid": "GPU-1", "signal": "temperature", "verdict": "FATAL", "total": 1},
        {"uuid": "GPU-1", "signal": "xid", "verdict": "FATAL", "total": 2},
        {"uuid": "GPU-1", "signal": "xid", "verdict": "OK", "total": 1},
    ]


def test_xids_are_counted_by_gpu_number_and_class():
    clock = iter((100.0, 200.0))
    reports = HealthReports(lambda: next(clock))
    for uuid, xid, kind in (("GPU-1", 31, "application"), ("GPU-1", 31, "application"), ("GPU-1", 4, "quiet")):
        reports.count_xid(uuid, xid, kind)
    assert list(reports.as_data()["xids"]) == [
        {"uuid": "GPU-1", "xid": 4, "class": "quiet", "total": 1, "first": 200.0},
        {"uuid": "GPU-1", "xid": 31, "class": "application", "total": 2, "first": 100.0},
    ]


def test_every_subscriber_is_given_every_change_and_one_that_fails_costs_the_others_nothing(caplog):
    reports = HealthReports()
    heard: list[Transition] = []

    def failing(_):
        raise RuntimeError("the API server is away")

    reports.subscribe(failing)
    reports.subscribe(heard.append)
    reports.report(change())
    reports.report(change())
    assert len(heard) == 2
    assert caplog.text.count("could not be reported") == 2
    assert reports.transitions["GPU-1", "xid", "FATAL"] == 2
