"""From facts to the lines and the verdict of each probe."""

from pathlib import Path

import pytest

from gpu_plugin.devices.device import Resource, with_held
from gpu_plugin.kubelet.registrations import Standing
from gpu_plugin.listener.checks import LATE, Facts, live, ready, started
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
    "standings": {GPU: Standing(SOCKET).taken(NOW - 60)},
}


def facts(**changed: object) -> Facts:
    return Facts(**{**GOOD, **changed})  # type: ignore[arg-type]


def lines(text: str, sign: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"[{sign}]")]


def test_all_is_well():
    assert live(facts(), NOW, NOW - 1, {}).text == (
        "[+]event-loop ok\n[+]gpu-looks ok\n[+]sockets ok\nlivez check passed\n"
    )
    assert ready(facts(cdi=""), NOW).text == (
        "[+]configuration ok\n[+]driver ok\n[+]resources ok\n[+]registrations ok\n[+]cdi-specifications ok\n"
        "readyz check passed\n"
    )
    assert started(facts()).text == "[+]configuration ok\n[+]driver ok\nstartupz check passed\n"
    assert all(verdict.passed for verdict in (live(facts(), NOW, NOW, {}), ready(facts(), NOW), started(facts())))


@pytest.mark.parametrize(
    ("changed", "beat", "silent", "line"),
    [
        ({}, NOW - LATE - 1, {}, "[-]event-loop failed: it last turned 6.0 s ago"),
        ({"turn_due": NOW - 12}, NOW, {}, "[-]gpu-looks failed: the turn of the GPUs is 12 s overdue"),
        (
            {},
            NOW,
            {MIG: "no connection: Connection refused", GPU: "no answer within 2 s"},
            f"[-]sockets failed: {GPU}: no answer within 2 s; {MIG}: no connection: Connection refused",
        ),
    ],
)
def test_what_a_restart_may_help_against(changed, beat, silent, line):
    verdict = live(facts(**changed), NOW, beat, silent)
    assert not verdict.passed
    assert lines(verdict.text, "-") == [line]
    assert len(lines(verdict.text, "+")) == 2
    assert verdict.text.endswith("livez check failed\n")


@pytest.mark.parametrize(
    "changed",
    [
        {"driver": None, "offered": False, "resources": {}},
        {"driver": "the NVIDIA driver cannot be used: no libnvidia-ml.so.1", "offered": False, "resources": {}},
        {"standings": {GPU: Standing().away("nobody answers", NOW)}},
        {"resources": {GPU: Resource(GPU, tuple(with_held(d, "Xid 79") for d in SERVED.devices))}},
        {"cdi": "/var/run/cdi: No space left on device"},
        {"awaited": "waiting for the label", "driver": None, "turn_due": float("inf")},
        {"turn_due": NOW},
    ],
)
def test_what_a_restart_would_not_help_against(changed):
    assert live(facts(**changed), NOW, NOW - LATE, {}).passed


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"awaited": "waiting for the label"}, "[-]configuration failed: waiting for the label"),
        ({"driver": None}, "[-]driver failed: it has not answered the first question for GPUs yet"),
        (
            {"driver": "the NVIDIA driver finds no GPU on this node"},
            "[-]driver failed: the NVIDIA driver finds no GPU on this node",
        ),
        ({"offered": False, "resources": {}}, "[-]resources failed: none is served yet"),
        (
            {"offered": False, "resources": {}, "unserved": ["two entries share nvidia.com/gpu"]},
            "[-]resources failed: none is served: two entries share nvidia.com/gpu",
        ),
        (
            {"standings": {}},
            "[-]registrations failed: nvidia.com/gpu: it has not been registered yet",
        ),
        (
            {"standings": {GPU: Standing(SOCKET).taken(NOW - 60).away("the kubelet dropped our stream", NOW - 7)}},
            "[-]registrations failed: nvidia.com/gpu: the kubelet dropped our stream (not registered for 7 s)",
        ),
        (
            {"resources": {GPU: SERVED, MIG: Resource(MIG, devices(1))}},
            "[-]registrations failed: nvidia.com/mig-1g.10gb: it has not been registered yet",
        ),
        (
            {"cdi": "/var/run/cdi: No space\nleft on device"},
            "[-]cdi-specifications failed: /var/run/cdi: No space left on device",
        ),
    ],
)
def test_what_keeps_it_from_being_ready(changed, line):
    verdict = ready(facts(**changed), NOW)
    assert not verdict.passed
    assert lines(verdict.text, "-") == [line]
    assert verdict.text.endswith("readyz check failed\n")


def test_nobody_asks_for_a_registration_where_none_is_wanted():
    verdict = ready(facts(registering=False, standings={GPU: Standing(SOCKET)}), NOW)
    assert verdict.passed
    assert "registrations" not in verdict.text


def test_a_node_that_serves_nothing_on_purpose_is_ready_and_says_why():
    verdict = ready(facts(resources={}, standings={}, unserved=["no GPU is served: all are excluded"]), NOW)
    assert verdict.passed
    assert "[+]resources ok: none is served; no GPU is served: all are excluded" in verdict.text


def test_a_resource_of_which_nothing_is_handed_out_is_ready_and_says_why():
    why = "MIG strategy single needs all GPUs with the same MIG mode"
    held = Resource(GPU, tuple(with_held(device, why) for device in SERVED.devices))
    verdict = ready(facts(resources={GPU: held}), NOW)
    assert verdict.passed
    assert f"[+]resources ok: nvidia.com/gpu: no device is healthy: {why}" in verdict.text
    empty = ready(facts(resources={GPU: Resource(GPU)}), NOW)
    assert "[+]resources ok: nvidia.com/gpu: it has no device" in empty.text


def test_the_start_is_over_once_the_driver_was_asked_whatever_it_said():
    assert not started(facts(driver=None)).passed
    assert not started(facts(awaited="waiting for the label")).passed
    missing = started(facts(driver="the NVIDIA driver cannot be used: it is not loaded"))
    assert missing.passed
    assert "[+]driver ok: the NVIDIA driver cannot be used: it is not loaded" in missing.text
