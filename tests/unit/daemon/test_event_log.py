"""The event log: recorded changes, and the origin of orders."""

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.daemon.event_log import LONGEST_REASON, LONGEST_REPLY, EventLog
from gpu_plugin.daemon.operations import Operations
from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.latch import Transition, Verdict
from gpu_plugin.kubelet.registrations import UNHEARD, Registrations
from gpu_plugin.runtime.control import server
from gpu_plugin.state.event_store import Event, EventStore, recollect
from gpu_plugin.state.log import StateLog
from gpu_plugin.status.model import Configuration

GPU = Gpu("GPU-6f1c", 3, pci_bus_id="00000000:1B:00.0")
WHICH: dict[str, Any] = {"uuid": "GPU-6f1c", "index": 3, "bus_id": "0000:1b:00.0"}


@pytest.fixture
def log(tmp_path):
    return EventLog(
        EventStore(StateLog(tmp_path), lambda: 7.0), cast("Operations", SimpleNamespace(gpus=(GPU,), gone=tuple))
    )


def texts(log):
    return [event.text for event in log.store.events]


def test_a_change_of_health_has_the_gpu_and_its_health(log):
    log.health(Transition("GPU-6f1c", "xid", Verdict.FATAL, Verdict.OK, "Xid 79", 1.0, xid=79))
    log.health(Transition("GPU-9", "temperature", Verdict.DEGRADED, Verdict.OK, "96 °C", 1.0, device="MIG-1"))
    first, second = log.store.events
    assert first == Event(7.0, "health", first.text, **WHICH, signal="xid", verdict="FATAL", xid=79)
    assert "GPU 3 (0000:1b:00.0, GPU-6f1c)" in first.text
    assert (second.uuid, second.device, second.verdict) == ("GPU-9", "MIG-1", "DEGRADED")
    assert "MIG device MIG-1 of GPU GPU-9" in second.text


def test_changes_of_registrations_are_recorded_once(log):
    registrations = Registrations(lambda: 1.0)
    registrations.subscribe(log.registration)
    registrations.away("r", "waiting for the kubelet")
    registrations.away("r", "waiting for the kubelet")
    registrations.away("r", UNHEARD)
    registrations.taken("r")
    registrations.taken("r")
    registrations.away("r", "the kubelet dropped our stream")
    assert texts(log) == [
        "r: not registered: waiting for the kubelet",
        "r: registered with the kubelet",
        "r: no longer registered: the kubelet dropped our stream",
    ]


def test_the_end_of_a_refusal_is_recorded(log):
    def status(*faults):
        return Configuration(refused=faults[0] if faults else "", faults=tuple(faults), reloads={"applied": 0})

    for _ in range(2):
        log.configuration(status("a: no", "b: no"))
    for _ in range(2):
        log.configuration(status())
    assert texts(log) == [
        "refused; the former configuration stays in force: a: no; b: no",
        "nothing is refused any more: the requested configuration is in force",
    ]


def test_applied_and_refused_configurations_are_recorded_once(log):
    def status(refused, applied):
        return Configuration(file="/etc/c.yaml", refused=refused, reloads={"applied": applied})

    for refused, applied in [("", 0), ("", 1), ("bad", 1), ("bad", 1), ("worse", 1), ("", 2)]:
        log.configuration(status(refused, applied))
    assert texts(log) == [
        "applied: /etc/c.yaml",
        "refused; the former configuration stays in force: bad",
        "refused; the former configuration stays in force: worse",
        "applied: /etc/c.yaml",
    ]


@pytest.mark.parametrize("name", ["6f1c", "1b:00.0", "GPU-6f1c"])
async def test_an_order_is_passed_on_by_uuid_and_recorded_with_its_origin(log, name):
    asked = []

    async def cordon(request):
        asked.append(dict(request))
        return {"done": "cordoned, until gpu-plugin uncordon --gpu 3.", "outcome": "cordoned."}

    server.asking.set(server.Peer(12, 1000, "gpu-plugin"))
    reply = await log.order("cordon", cordon)({"gpu": name, "reason": "fan is loud"})
    assert (reply["done"], asked) == (
        "cordoned, until gpu-plugin uncordon --gpu 3.",
        [{"gpu": "GPU-6f1c", "reason": "fan is loud"}],
    )
    who: dict[str, Any] = {"by": "uid 1000, process 12 (gpu-plugin)", "reason": "fan is loud"}
    assert list(log.store.events) == [Event(7.0, "order", "cordon: cordoned.", **WHICH, **who)]


async def test_a_refused_order_is_recorded_and_refused(log):
    async def cordon(_request):
        raise ConfigError("no such GPU")

    with pytest.raises(ConfigError, match="no such GPU"):
        await log.order("cordon", cordon)({"gpu": 3})
    assert texts(log) == ["cordon: refused: no such GPU"]
    assert log.store.events[0].index == 3


@pytest.mark.parametrize("reason", [7, "x" * (LONGEST_REASON + 1), "a line\nand another", "\x1b[2J"])
async def test_a_reason_is_a_short_text(log, reason):
    async def never(_request):
        raise AssertionError

    with pytest.raises(ConfigError, match="reason: a text of at most"):
        await log.order("cordon", never)({"gpu": 3, "reason": reason})
    assert not log.store.events


@pytest.mark.parametrize("gpu", [None, 3, "GPU-unknown", True, [1]])
async def test_an_unknown_name_is_passed_on(log, gpu):
    async def echo(request):
        return request

    assert await log.resolved(echo)({"gpu": gpu}) == {"gpu": gpu}


async def test_events_of_all_gpus_or_one_gpu(log):
    log.daemon("started")
    log.health(Transition("GPU-6f1c", "xid", Verdict.FATAL, Verdict.OK, "Xid 79", 1.0, xid=79))
    told = await log.answer({})
    assert [event["kind"] for event in told["events"]] == ["daemon", "health"]
    for name in ("1b:00.0", 3, "3", "GPU-6f"):
        assert [event["kind"] for event in (await log.answer({"gpu": name}))["events"]] == ["health"]
    log.health(Transition("GPU-gone", "vanished", Verdict.FATAL, Verdict.OK, "gone", 1.0))
    assert [event["uuid"] for event in (await log.answer({"gpu": "GPU-gone"}))["events"]] == ["GPU-gone"]
    with pytest.raises(ConfigError, match="GPU 9: no GPU of this node has this name"):
        await log.answer({"gpu": 9})
    with pytest.raises(ConfigError, match="gpu: True is neither"):
        await log.answer({"gpu": True})
    with pytest.raises(ConfigError, match="until: not a field of this verb"):
        await log.answer({"until": 1})


async def test_a_long_reply_leaves_out_the_oldest_events(log):
    for number in range(1000):
        log.daemon(f"{number} " + "ä" * 400)
    told = await log.answer({})
    assert len(json.dumps(told)) < LONGEST_REPLY + 20_000
    assert told["left_out"] == 1000 - len(told["events"]) > 0
    assert told["events"][-1]["text"].startswith("999 ")


async def test_an_order_is_answered_after_it_is_stored(log, tmp_path, monkeypatch):
    slow = threading.Event()
    add = StateLog.add_event
    monkeypatch.setattr(StateLog, "add_event", lambda *words: slow.wait(10) and add(*words))

    async def done(_request):
        return {"done": "it is cordoned"}

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(log.store.run)
        await anyio.lowlevel.checkpoint()
        asyncio.get_running_loop().call_later(0.05, slow.set)
        await log.order("cordon", done)({"gpu": 3})
        assert [event.text for event in recollect(tmp_path)[0]] == ["cordon: it is cordoned"]
        tasks.cancel_scope.cancel()


async def test_an_order_that_cannot_be_recorded_is_answered(log, monkeypatch):
    monkeypatch.setattr(StateLog, "add_event", lambda *_: False)

    async def done(_request):
        return {"done": "it is cordoned"}

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(log.store.run)
        await anyio.lowlevel.checkpoint()
        with anyio.fail_after(10):
            assert await log.order("cordon", done)({"gpu": 3})
        assert "events cannot be written" in log.store.trouble
        tasks.cancel_scope.cancel()
