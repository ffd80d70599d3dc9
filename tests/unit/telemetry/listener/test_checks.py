"""The lines and the status of each probe, from the facts about the daemon."""

from pathlib import Path

import pytest

from gpu_plugin.devices.device import Resource, withhold
from gpu_plugin.kubelet.registrations import UNHEARD, ResourceRegistration
from gpu_plugin.telemetry.listener.checks import (
    BEAT_INTERVAL,
    LATE,
    RECENT,
    Facts,
    LoopLag,
    Pause,
    live,
    ready,
    started,
)
from tests.unit.kubelet.serving import devices

GPU, MIG = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"
NOW = 1000.0
SOCKET = Path("/dp/gpu.sock")
SERVED = Resource(GPU, devices(2))
GOOD = {
    "driver": "",
    "turn_due": NOW + 200,
    "offered": True,
    "resources": {GPU: SERVED},
    "standings": {GPU: ResourceRegistration(SOCKET, NOW - 60, None, "")},
}


def facts(**changed: object) -> Facts:
    return Facts(**{**GOOD, **changed})  # type: ignore[arg-type]


def lines(text: str, sign: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"[{sign}]")]


def test_all_is_well():
    assert live(facts(), NOW, {}).text == ("[+]event-loop ok\n[+]gpu-looks ok\n[+]sockets ok\nlivez check passed\n")
    assert ready(facts(cdi=""), NOW).text == (
        "[+]configuration ok\n[+]driver ok\n[+]resources ok\n[+]registrations ok\n[+]cdi-specifications ok\n"
        "readyz check passed\n"
    )
    assert started(facts()).text == "[+]configuration ok\n[+]driver ok\nstartupz check passed\n"
    assert all(verdict.status == 200 for verdict in (live(facts(), NOW, {}), ready(facts(), NOW), started(facts())))


@pytest.mark.parametrize(
    ("changed", "silent", "line"),
    [
        ({"turn_due": NOW - 12}, {}, "[-]gpu-looks failed: the turn of the GPUs is 12 s overdue"),
        (
            {},
            {MIG: "no connection: Connection refused", GPU: "no answer within 2 s"},
            f"[-]sockets failed: {GPU}: no answer within 2 s; {MIG}: no connection: Connection refused",
        ),
    ],
)
def test_failures_that_a_restart_may_repair_fail_the_liveness_probe(changed, silent, line):
    verdict = live(facts(**changed), NOW, silent)
    assert verdict.status == 503
    assert lines(verdict.text, "-") == [line]
    assert len(lines(verdict.text, "+")) == 2
    assert verdict.text.endswith("livez check failed\n")


@pytest.mark.parametrize(
    "changed",
    [
        {"driver": None, "offered": False, "resources": {}},
        {"driver": "the NVIDIA driver cannot be used: no libnvidia-ml.so.1", "offered": False, "resources": {}},
        {"standings": {GPU: ResourceRegistration(why="nobody answers")}},
        {"resources": {GPU: Resource(GPU, tuple(withhold(d, "Xid 79") for d in SERVED.devices))}},
        {"cdi": "/c: No space"},
        {"awaited": "waiting for the label", "driver": None, "turn_due": float("inf")},
        {"turn_due": NOW},
    ],
)
def test_failures_that_a_restart_cannot_repair_keep_the_liveness_probe(changed):
    assert live(facts(**changed), NOW, {}).status == 200


def test_a_socket_that_could_not_be_called_for_lack_of_descriptors_is_no_failure():
    verdict = live(facts(), NOW, {}, "Too many open files")
    assert verdict.status == 200
    assert "[+]sockets ok: not all were called: Too many open files" in verdict.text
    failing = live(facts(), NOW, {GPU: "no answer within 2 s"}, "Too many open files")
    assert lines(failing.text, "-") == [f"[-]sockets failed: {GPU}: no answer within 2 s"]


def test_a_blocked_event_loop_is_reported_and_is_no_failure():
    verdict = live(facts(), NOW, {}, "", Pause(7.25, NOW - 12))
    assert verdict.status == 200
    assert "[+]event-loop ok: it was blocked for 7.2 s, until 12 s ago" in verdict.text


def test_the_longest_recent_pause_between_beats():
    beats = LoopLag()
    assert beats.longest(NOW) is None
    at = NOW
    for pause in (BEAT_INTERVAL, BEAT_INTERVAL + LATE, 8.0, BEAT_INTERVAL, 7.0, BEAT_INTERVAL):
        beats.beat(at)
        at += pause
    beats.beat(at)  # the last one
    assert beats.longest(at) == Pause(8.0, NOW + BEAT_INTERVAL + BEAT_INTERVAL + LATE + 8.0)
    assert beats.longest(at + BEAT_INTERVAL + LATE) == Pause(8.0, NOW + BEAT_INTERVAL + BEAT_INTERVAL + LATE + 8.0)
    assert beats.longest(at + 20.0) == Pause(20.0, at + 20.0)  # the loop stood still, and has not beaten since
    later = at
    while later < at + RECENT:
        later += BEAT_INTERVAL
        beats.beat(later)
    assert beats.longest(later) is None


def test_old_pauses_are_dropped():
    beats = LoopLag()
    for at in range(1000):
        beats.beat(at * 7.0)
    assert len(beats._pauses) < 12


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"awaited": "waiting for the label", "driver": None}, "[-]configuration failed: waiting for the label"),
        ({"driver": None}, "[-]driver failed: the first attempt to find GPUs is not over yet"),
        ({"offered": False, "resources": {}}, "[-]resources failed: no resource is served yet"),
        (
            {"offered": False, "resources": {}, "unserved": ["two entries"]},
            "[-]resources failed: no resource is served: two entries",
        ),
        ({"standings": {}}, "[-]registrations failed: nvidia.com/gpu: it has not been registered yet"),
        (
            {"standings": {GPU: ResourceRegistration(SOCKET, why=UNHEARD)}},
            "[-]registrations failed: nvidia.com/gpu: registered, but the kubelet has not opened its stream yet",
        ),
        (
            {"standings": {GPU: ResourceRegistration(SOCKET, None, NOW - 7, "dropped")}},
            "[-]registrations failed: nvidia.com/gpu: dropped (lost 7 s ago)",
        ),
        (
            {"resources": {GPU: SERVED, MIG: Resource(MIG, devices(1))}},
            "[-]registrations failed: nvidia.com/mig-1g.10gb: it has not been registered yet",
        ),
        ({"cdi": "/c: No\nspace"}, "[-]cdi-specifications failed: /c: No space"),
    ],
)
def test_reasons_that_prevent_readiness(changed, line):
    verdict = ready(facts(**changed), NOW)
    assert verdict.status == 503
    assert lines(verdict.text, "-") == [line]
    assert verdict.text.endswith("readyz check failed\n")


DRIVER = "the NVIDIA driver cannot be used: it is not loaded"
NOT_SERVED = ["the new GPU cannot be offered", "GPU 3 has no MIG devices"]
EXCLUDED = "no GPU is served: all are excluded"
WITHHELD = Resource(GPU, tuple(withhold(device, "MIG strategy single") for device in SERVED.devices))


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"driver": DRIVER}, f"[+]driver ok: {DRIVER}"),
        ({"driver": DRIVER}, "[+]resources ok"),  # the former resources are still served
        ({"driver": DRIVER, "offered": False, "resources": {}, "standings": {}}, f"[+]driver ok: {DRIVER}"),
        ({"refused": "f:3: no"}, "[+]configuration ok: the former configuration is in force; refused: f:3: no"),
        ({"unserved": NOT_SERVED}, f"[+]resources ok: {'; '.join(NOT_SERVED)}"),
        (
            {"resources": {}, "standings": {}, "unserved": [EXCLUDED]},
            f"[+]resources ok: no resource is served; {EXCLUDED}",
        ),
        ({"resources": {GPU: WITHHELD}}, f"[+]resources ok: {GPU}: no device is healthy: MIG strategy single"),
        ({"resources": {GPU: Resource(GPU)}}, f"[+]resources ok: {GPU}: it has no device"),
    ],
)
def test_reasons_that_do_not_prevent_readiness_are_reported(changed, line):
    verdict = ready(facts(**changed), NOW)
    assert verdict.status == 200
    assert line in verdict.text.splitlines()


def test_without_a_configuration_only_the_configuration_is_reported():
    assert ready(facts(awaited="f:3: no", driver=None, offered=False, resources={}), NOW).text == (
        "[-]configuration failed: f:3: no\nreadyz check failed\n"
    )


def test_registrations_are_not_checked_if_the_daemon_does_not_register():
    verdict = ready(facts(registering=False, standings={GPU: ResourceRegistration(SOCKET)}), NOW)
    assert verdict.status == 200
    assert "registrations" not in verdict.text


def test_the_start_is_complete_after_the_first_attempt_to_open_the_driver():
    assert started(facts(driver=None)).status == 503
    assert started(facts(awaited="waiting for the label", driver=None)).text == (
        "[-]configuration failed: waiting for the label\nstartupz check failed\n"
    )
    refused = started(facts(awaited="f:3: no", tried=True, driver=None))
    assert refused.text == "[+]configuration ok: f:3: no\nstartupz check passed\n"
    missing = started(facts(driver="the NVIDIA driver cannot be used: it is not loaded"))
    assert missing.status == 200
    assert "[+]driver ok: the NVIDIA driver cannot be used: it is not loaded" in missing.text


def test_a_complete_start_stays_complete():
    asking = started(facts(driver=None), before=True)
    assert asking.status == 200
    assert "[+]driver ok: the first attempt to find GPUs is not over yet" in asking.text
    assert started(facts(awaited="waiting for the label", driver=None), before=True).status == 200


def test_a_daemon_that_waits_for_another_daemon_is_alive_and_started_and_not_ready():
    waiting = Facts(waits_for="another daemon serves /dp: process 7")
    assert live(waiting, NOW, {}).status == 200
    assert started(waiting).text == "[+]node ok: another daemon serves /dp: process 7\nstartupz check passed\n"
    told = ready(waiting, NOW)
    assert (told.status, told.text) == (
        503,
        "[-]node failed: another daemon serves /dp: process 7\nreadyz check failed\n",
    )


def test_a_daemon_in_standby_is_ready():
    standby = Facts(waits_for="another daemon uses the state directory /s: process 7", standby=True)
    assert ready(standby, NOW).status == 200
