"""The whole daemon in the test's process, so that tests can count calls and make single parts fail."""

import errno
import os
import shutil
import signal
import threading
import time
from contextlib import asynccontextmanager, suppress
from functools import partial

import anyio
import anyio.to_thread
import msgspec
import pytest
from msgspec.structs import replace

from demo.stand_in_kubelet import AdmissionError, StandInKubelet
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.resolve import resolve
from gpu_plugin.containers.cdi_files import keeper
from gpu_plugin.containers.cdi_files import watch as cdi_watch
from gpu_plugin.containers.cdi_files.source import SpecSource
from gpu_plugin.containers.edits import Access
from gpu_plugin.containers.strategy_choice import ContainerdEvidence, CriSection, KubeletEvidence, NodeEvidence
from gpu_plugin.daemon import commands, discovery, faulting_pods, process, reported_errors
from gpu_plugin.daemon import daemon as daemon_module
from gpu_plugin.daemon.config_source import ConfigSource
from gpu_plugin.daemon.configuration import Configuration
from gpu_plugin.daemon.daemon import Daemon
from gpu_plugin.daemon.hardware import Hardware
from gpu_plugin.daemon.list_strategy import ListStrategy
from gpu_plugin.devices import retirement
from gpu_plugin.devices.device import Resource
from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.observation import ApplicationError
from gpu_plugin.kubelet import listing, takeover
from gpu_plugin.kubelet.directory import watch
from gpu_plugin.kubelet.endpoint import ResourceEndpoint, Shared
from gpu_plugin.kubelet.snapshot import ResourceView, SnapshotStore
from gpu_plugin.nvml import monitor
from gpu_plugin.nvml.port import NvmlError
from gpu_plugin.placement.subsets import Placement
from gpu_plugin.runtime import control
from gpu_plugin.runtime.control import server
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.signals import Signals
from gpu_plugin.simulation import driver_files
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.host import SimulatedHost
from gpu_plugin.simulation.profile import load
from gpu_plugin.state import recorder
from gpu_plugin.state.log import DEVICES, EVENT, FILES, GPUS, HEALTH, StateLog
from gpu_plugin.status.model import Status
from gpu_plugin.telemetry.listener import probes as probes_module
from gpu_plugin.telemetry.listener.answer import Request
from gpu_plugin.telemetry.listener.probes import Probes
from tests.state_log import stored
from tests.unit.waiting import until

GPU = "nvidia.com/gpu"


@asynccontextmanager
async def running(directory, node, *, driver=None, **flags):
    """Run a daemon on `node` through `driver`. Gives the daemon, the driver, and a list that gets the exit status."""
    asked = {
        "device_plugin_dir": str(directory),
        "state_dir": str(directory / "state"),
        "health_poll_interval": "50ms",
        "fail_on_init_error": "false",
        **flags,
    }
    driver = driver or SimulatedDriver(node)
    settings = resolve(asked, {})
    configuration = Configuration(settings, ConfigSource(settings), lambda _: resolve(asked, {}), process.UNCHANGEABLE)
    root = str(driver_files.make(directory / "driver", node.profile.driver_version)) if "cdi_dir" in flags else ""
    daemon = Daemon(configuration, Hardware(driver, SimulatedHost(node), "/", driver_roots=lambda: [(root, root)]))
    status = []

    async def run():
        status.append(await daemon.run(Signals()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        yield daemon, driver, status
        tasks.cancel_scope.cancel()


def healthy(kubelet, count):
    return lambda: GPU in kubelet.resources and kubelet.resources[GPU].allocatable == count


def driver_is_not_loaded(node, monkeypatch):
    node.refuse("open", Return.DRIVER_NOT_LOADED, times=3)


def driver_finds_no_gpu(node, monkeypatch):
    counts, real = [0, 0], SimulatedDriver.device_count
    monkeypatch.setattr(SimulatedDriver, "device_count", lambda self: counts.pop() if counts else real(self))


def driver_raises_another_error(node, monkeypatch):
    failures, real = [PermissionError("not today")], SimulatedDriver.open

    def failing(self):
        if failures:
            raise failures.pop()
        real(self)

    monkeypatch.setattr(SimulatedDriver, "open", failing)


@pytest.mark.parametrize(
    ("fail", "logged"),
    [
        (driver_is_not_loaded, "the NVIDIA driver cannot be used: "),
        (driver_finds_no_gpu, "finds no GPU on this node"),
        (driver_raises_another_error, "PermissionError('not today')"),
    ],
)
async def test_a_failed_start_is_retried_and_logged_once(kubelet, directory, node, monkeypatch, caplog, fail, logged):
    monkeypatch.setattr(discovery, "FIRST_RETRY", 0.01)
    fail(node, monkeypatch)
    async with running(directory, node):
        await kubelet.wait_for(healthy(kubelet, 8))
    assert caplog.text.count(logged) == 1


async def test_no_rpc_calls_the_driver(kubelet, directory, node):
    async with running(directory, node, health_poll_interval="1h") as (_, driver, _status):
        await kubelet.wait_for(healthy(kubelet, 8))
        with anyio.fail_after(5):  # each GPU is read once before registration and once after it
            while driver.calls["temperature"] < 16:
                await anyio.lowlevel.checkpoint()
        before = {name: count for name, count in driver.calls.items() if name != "wait"}
        for pod, size in enumerate((1, 2, 3)):
            await kubelet.admit(f"pod-{pod}", {GPU: size})
        assert {name: count for name, count in driver.calls.items() if name != "wait"} == before


async def test_preferences_work_with_a_lost_gpu(kubelet, directory, node):
    async with running(directory, node) as (_, _driver, _status):
        await kubelet.wait_for(healthy(kubelet, 8))
        node.lose(2)
        await kubelet.wait_for(healthy(kubelet, 7))
        admission = await kubelet.admit("pod", {GPU: 2})
        assert len(admission.allocations[0].preferred) == 2


async def test_rpcs_are_answered_while_all_gpus_hang(kubelet, directory, node):
    async with running(directory, node) as (_, _driver, _status):
        await kubelet.wait_for(healthy(kubelet, 8))
        for gpu in range(8):
            node.hang(gpu, 3600)
        try:
            await kubelet.drop_stream(GPU)
            await kubelet.wait_for(lambda: kubelet.registrations[GPU].accepted == 2, timeout=1)
            await kubelet.wait_for(healthy(kubelet, 8), timeout=1)
            with anyio.fail_after(1):
                await kubelet.admit("pod", {GPU: 2})
        finally:
            for gpu in range(8):
                node.heal(gpu)


async def test_a_failed_part_is_restarted_alone(kubelet, directory, node, monkeypatch, caplog):
    monkeypatch.setattr(discovery, "FIRST_RETRY", 0.01)
    failures = [RuntimeError("inotify is tired")]

    async def failing(watched, *arguments):
        if failures and watched == directory:
            raise failures.pop()
        await watch(watched, *arguments)

    monkeypatch.setattr(daemon_module, "watch", failing)
    async with running(directory, node):
        await kubelet.wait_for(healthy(kubelet, 8))
        await kubelet.restart()
        await kubelet.wait_for(healthy(kubelet, 8), timeout=2)
    assert "the directory watch failed" in caplog.text


async def test_a_duplicate_uuid_hides_no_other_gpu(kubelet, directory, node, monkeypatch, caplog):
    real = SimulatedDriver.uuid
    twin = node.profile.gpus[4].uuid

    def uuid(self, handle):
        said = real(self, handle)
        return twin if said == node.profile.gpus[5].uuid else said

    monkeypatch.setattr(SimulatedDriver, "uuid", uuid)
    async with running(directory, node):
        await kubelet.wait_for(healthy(kubelet, 7))
        assert kubelet.resources[GPU].capacity == 8
    assert "claims the uuid of another GPU" in caplog.text


async def test_gpus_are_unhealthy_while_a_required_device_node_is_missing(
    kubelet, directory, node, monkeypatch, caplog
):
    shown = set(node.device_nodes()) - {"/dev/nvidia-uvm"}
    monkeypatch.setattr(SimulatedNode, "device_nodes", lambda _: frozenset(shown))
    async with running(directory, node, pass_device_specs="true"):
        await kubelet.wait_for(lambda: GPU in kubelet.resources and len(kubelet.resources[GPU].devices) == 8)
        assert healthy(kubelet, 0)()
        assert "/dev/nvidia-uvm does not exist" in caplog.text
        shown.add("/dev/nvidia-uvm")
        await kubelet.wait_for(healthy(kubelet, 8))
        response = (await kubelet.admit("late", {GPU: 1})).allocations[0].response
        assert "/dev/nvidia-uvm" in [spec.container_path for spec in response.devices]
        shown.remove("/dev/nvidiactl")
        await kubelet.wait_for(healthy(kubelet, 0))


async def test_with_cdi_gpus_are_healthy_once_the_specification_has_the_required_node(
    kubelet, directory, node, monkeypatch
):
    monkeypatch.setattr(keeper, "LOOK_EVERY", 0.05)
    shown = set(node.device_nodes()) - {"/dev/nvidia-uvm"}
    monkeypatch.setattr(SimulatedNode, "device_nodes", lambda _: frozenset(shown))
    written = directory / "cdi/k8s.device-plugin.nvidia.com-gpu.json"
    async with running(directory, node, device_list_strategy="cdi-cri", cdi_dir=str(written.parent)):
        await kubelet.wait_for(lambda: GPU in kubelet.resources and len(kubelet.resources[GPU].devices) == 8)
        assert healthy(kubelet, 0)()
        shown.add("/dev/nvidia-uvm")
        await kubelet.wait_for(healthy(kubelet, 8))
        assert '"/dev/nvidia-uvm"' in written.read_text()
        shown.remove("/dev/nvidia-uvm")
        await kubelet.wait_for(healthy(kubelet, 0))


async def test_late_device_nodes_reach_pods(kubelet, directory, node, monkeypatch):
    shown = {"/dev/nvidiactl"}
    monkeypatch.setattr(SimulatedHost, "device_roots", lambda _: dict.fromkeys(shown, ""))
    async with running(directory, node, pass_device_specs="true"):
        await kubelet.wait_for(healthy(kubelet, 8))

        async def control_nodes(pod):
            response = (await kubelet.admit(pod, {GPU: 1})).allocations[0].response
            return [spec.container_path for spec in response.devices][:-1]

        assert await control_nodes("early") == ["/dev/nvidiactl"]
        shown.add("/dev/nvidia-uvm")
        with anyio.fail_after(5):
            for attempt in range(7):
                await anyio.sleep(0.2)
                if await control_nodes(f"late-{attempt}") == ["/dev/nvidiactl", "/dev/nvidia-uvm"]:
                    break
            else:
                raise AssertionError("the node that came late reached no pod")


async def test_the_event_set_is_created_again_after_a_failure(kubelet, directory, node):
    node.refuse("event_set", Return.UNKNOWN, times=1)
    async with running(directory, node) as (_, driver, _status):
        await kubelet.wait_for(healthy(kubelet, 8))
        await until(lambda: driver.calls["wait"])
        node.post(3, 8, 79)
        await kubelet.wait_for(healthy(kubelet, 7))


async def test_a_driver_with_invalid_handles_is_opened_again(kubelet, directory, node):
    async with running(directory, node) as (_, driver, _status):
        await kubelet.wait_for(healthy(kubelet, 8))
        driver.close()  # like an unloaded and reloaded kernel module: all handles are invalid
        await kubelet.wait_for(healthy(kubelet, 0))
        await kubelet.wait_for(healthy(kubelet, 8))
        await until(lambda: node.post(3, 8, 79))
        await kubelet.wait_for(healthy(kubelet, 7))


async def test_a_stalled_disk_does_not_delay_the_end(kubelet, directory, node, monkeypatch):
    stalled = threading.Event()
    async with running(directory, node) as (daemon, _, _status):
        await kubelet.wait_for(healthy(kubelet, 8))
        for write in ("write_evidence", "write_hardware"):
            monkeypatch.setattr(daemon._memory, write, lambda *_: stalled.wait(30))
        node.post(2, 8, 79)
        await kubelet.wait_for(healthy(kubelet, 7))
        began = time.monotonic()
    assert time.monotonic() - began < 2
    stalled.set()


async def test_a_hanging_last_write_does_not_delay_the_end(kubelet, directory, node, monkeypatch):
    stalled = threading.Event()
    async with running(directory, node) as (_, _, status):
        await kubelet.wait_for(healthy(kubelet, 8))
        monkeypatch.setattr(StateLog, "add_event", lambda *_: stalled.wait())
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: status)
    assert status == [0]
    stalled.set()


async def test_a_driver_is_opened_again_after_a_long_absence(kubelet, directory, node, monkeypatch):
    monkeypatch.setattr(monitor, "LOOK_GAP", 0.01)
    async with running(directory, node) as (_, driver, _status):
        await kubelet.wait_for(healthy(kubelet, 8))
        node.refuse("open", Return.DRIVER_NOT_LOADED, times=4)
        driver.close()
        await kubelet.wait_for(healthy(kubelet, 0))
        await kubelet.wait_for(healthy(kubelet, 8))
        assert driver.calls["open"] == 6


async def test_the_status_complains_about_a_configuration_without_gpus(kubelet, directory, node):
    async with running(directory, node, exclude_gpus="0,1,2,3,4,5,6,7"):

        async def told():
            with suppress(control.ControlError):
                problems = (await status_of(directory)).problems
                return any(each.kind == "unoffered" and "no GPU is served" in each.cause for each in problems)

        await until_true(told)


async def test_a_gpu_lost_at_a_boot_is_missing_until_an_operator_drops_it(kubelet, directory, node, caplog):
    async with running(directory, node):
        await kubelet.wait_for(healthy(kubelet, 8))
    uuid = node.profile.gpus[3].uuid
    node.reboot()
    node.vanish(3)

    async def missing():
        status = await status_of(directory)
        assert any(each.kind == "missing-gpu" and each.gpu == uuid for each in status.problems) is bool(status.missing)
        return [each.uuid for each in status.missing]

    for _ in range(2):
        async with running(directory, node):
            await kubelet.wait_for(healthy(kubelet, 7))
            assert await missing() == [uuid], "also over a restart of the plugin"
    assert any(uuid in record.getMessage() and record.levelname == "WARNING" for record in caplog.records)
    async with running(directory, node):
        await kubelet.wait_for(healthy(kubelet, 7))
        (listed,) = (await ask(directory, "status"))["missing"]
        await ask(directory, "uncordon", gpu=listed["bus_id"], override=True)
        assert await missing() == []
    async with running(directory, node):
        await kubelet.wait_for(healthy(kubelet, 7))
        assert await missing() == []


async def test_an_override_after_a_boot_applies_to_the_present_gpu(kubelet, directory, node):
    async with running(directory, node):
        await kubelet.wait_for(healthy(kubelet, 8))
    node.reboot()
    async with running(directory, node):
        await kubelet.wait_for(healthy(kubelet, 8))
        assert (
            "not known" not in (await ask(directory, "uncordon", gpu=node.profile.gpus[3].uuid, override=True))["done"]
        )


async def test_the_status_has_all_state_that_cannot_be_written(kubelet, directory, node, monkeypatch):
    async with running(directory, node) as (daemon, _driver, _status):
        await kubelet.wait_for(healthy(kubelet, 8))
        assert (await answers(directory, "status"))["state"]["trouble"] == ""
        monkeypatch.setattr(
            type(daemon.configuration), "storage_trouble", "which config file is in force cannot be written down"
        )
        monkeypatch.setattr(type(daemon._events.store), "trouble", "events cannot be written down")
        told = await ask(directory, "status")
        assert "which config file is in force cannot be written down" in told["state"]["trouble"]
        assert "events cannot be written down" in told["state"]["trouble"]
        assert [each["kind"] for each in told["problems"]] == ["state"]


@pytest.mark.parametrize(("chosen_by_label", "ended"), [(False, [2]), (True, [])])
async def test_an_impossible_configuration_ends_a_start_unless_the_label_chooses_it(
    directory, node, monkeypatch, chosen_by_label, ended
):
    def refused(*_arguments):
        raise ConfigError("this node cannot do that")

    monkeypatch.setattr(discovery, "offer", refused)
    async with running(directory, node) as (daemon, _driver, status):
        if chosen_by_label:
            daemon.configuration.store.current = replace(daemon.settings, config_file_srcdir=str(directory / "configs"))

        async def known():
            if status or not chosen_by_label:
                return bool(status)
            with suppress(control.ControlError):
                told = await ask(directory, "status")
                return told["unoffered"] == ["this node cannot do that"] and "unoffered" in {
                    each["kind"] for each in told["problems"]
                }

        await until_true(known)
        assert status == ended


async def until_true(expected, seconds=10):
    with anyio.fail_after(seconds):
        while not await expected():
            await anyio.sleep(0.01)


async def ask(directory, verb, **fields):
    """Return the answer of the daemon's control socket to a verb."""
    return await anyio.to_thread.run_sync(lambda: control.request(directory / "state", verb, **fields))


async def status_of(directory):
    """Return the status of the daemon."""
    return msgspec.convert(await ask(directory, "status"), Status)


async def answers(directory, verb, **fields):
    """Return the answer to a verb as soon as a daemon answers."""
    answer = {}

    async def answered():
        with suppress(control.ControlError):
            answer.update(await ask(directory, verb, **fields))
        return bool(answer)

    await until_true(answered)
    return answer


async def test_a_list_too_long_by_retired_devices_does_not_end_a_start(kubelet, directory, node, monkeypatch, caplog):
    monkeypatch.setattr(listing, "MAX_LIST_BYTES", 400)  # enough for six devices
    monkeypatch.setattr(listing, "SETTLE", 0.0)
    monkeypatch.setattr(retirement, "SETTLE", 0.0)
    async with running(directory, node, include_gpus="0,1,2,3,4"):
        await kubelet.wait_for(healthy(kubelet, 5))
        former = set(kubelet.resources[GPU].devices)
        await kubelet.wait_for(lambda: bool(stored(directory / "state", DEVICES)))
    async with running(directory, node, include_gpus="3,4,5,6,7") as (_daemon, _driver, status):
        await kubelet.wait_for(healthy(kubelet, 5), timeout=20)
        await kubelet.wait_for(lambda: len(kubelet.resources[GPU].devices) == 5, timeout=20)
        assert len(former & kubelet.resources[GPU].devices.keys()) == 2
        assert not status
    assert "not offered yet" in caplog.text


async def test_orders_work_without_a_driver(kubelet, directory, node, monkeypatch):
    async with running(directory, node):
        await kubelet.wait_for(healthy(kubelet, 8))
    monkeypatch.setattr(discovery, "FIRST_RETRY", 0.01)
    monkeypatch.setattr(discovery, "LONGEST_RETRY", 0.05)
    real, loaded = SimulatedDriver.open, threading.Event()

    def opening(self):
        if not loaded.is_set():
            raise NvmlError(Return.DRIVER_NOT_LOADED, "nvmlInit_v2")
        real(self)

    monkeypatch.setattr(SimulatedDriver, "open", opening)
    async with running(directory, node) as (daemon, _driver, _status):
        told = await answers(directory, "status")
        assert [gpu["index"] for gpu in told["gpus"]] == list(range(8))  # known from the earlier process
        assert (await ask(directory, "status"))["resources"] == {}
        assert "is cordoned" in (await ask(directory, "cordon", gpu=2))["done"]
        cordoned = node.profile.gpus[2].uuid
        with anyio.fail_after(10):
            while "cordoned" not in daemon.store.current.hardware[cordoned].health.reason:
                await daemon.store.changed.wait()
        assert "released" in (await ask(directory, "release", gpu=3))["done"]
        assert "cordon" in {entry["signal"] for entry in stored(directory / "state", HEALTH)["evidence"]}
        assert len(stored(directory / "state", GPUS)["gpus"]) == 8
        loaded.set()
        await kubelet.wait_for(healthy(kubelet, 6))
        assert "resumed" in (await ask(directory, "resume"))["done"]
        await kubelet.wait_for(healthy(kubelet, 7))
        await ask(directory, "uncordon", gpu=2)
        await kubelet.wait_for(healthy(kubelet, 8))


async def test_a_released_gpu_stays_released_after_a_restart(kubelet, directory, node):
    async with running(directory, node):
        await kubelet.wait_for(healthy(kubelet, 8))
        assert "NVML has no handle of it" in (await ask(directory, "release", gpu=3))["done"]
        await kubelet.wait_for(healthy(kubelet, 7))
    async with running(directory, node):
        await kubelet.wait_for(healthy(kubelet, 7))
        assert kubelet.resources[GPU].unhealthy == {node.profile.gpus[3].uuid}
        told = (await status_of(directory)).gpus[3]
        assert "maintenance" in [signal.name for signal in told.signals]
        await ask(directory, "resume", gpu=3)
        await kubelet.wait_for(healthy(kubelet, 8))


async def test_released_gpus_stay_released_after_a_restart_without_driver_calls(kubelet, directory, node):
    async with running(directory, node) as (_daemon, driver, _status):
        await kubelet.wait_for(healthy(kubelet, 8))
        assert "NVML is shut down" in (await ask(directory, "release"))["done"]
        await kubelet.wait_for(healthy(kubelet, 0))
    async with running(directory, node) as (_daemon, driver, _status):
        await kubelet.wait_for(lambda: kubelet.registrations[GPU].accepted == 2 and kubelet.resources[GPU].streams == 1)
        assert (kubelet.resources[GPU].capacity, kubelet.resources[GPU].allocatable) == (8, 0)
        assert not driver.calls["open"]
        await ask(directory, "resume")
        await kubelet.wait_for(healthy(kubelet, 8))


async def test_a_fault_of_a_gpu_without_a_resource_is_in_the_status_and_sends_no_list(kubelet, directory, node):
    node.partition(0, [])  # in MIG mode without a MIG device: it is in no resource
    async with running(directory, node, mig_strategy="mixed") as (daemon, *_):
        await kubelet.wait_for(healthy(kubelet, 7))
        lists, before = kubelet.resources[GPU].lists, (await ask(directory, "status"))["counters"]["snapshot_version"]
        node.post(0, 8, 79)

        async def told():
            status = await status_of(directory)
            gpu = next(each for each in status.gpus if each.index == 0)
            return not gpu.healthy and status.counters.snapshot_version > before

        await until_true(told)
        sick = daemon.store.current.hardware[node.profile.gpus[0].uuid]
        assert (sick.index, sick.health.verdict) == ("0", Verdict.FATAL)
        assert "Xid 79" in sick.health.reason
        assert (kubelet.resources[GPU].lists, kubelet.resources[GPU].allocatable) == (lists, 7)


async def test_application_errors_of_two_pods_degrade_the_gpu(directory, monkeypatch):
    monkeypatch.setattr(faulting_pods, "QUERY_INTERVAL", 0.01)
    monkeypatch.setattr(reported_errors, "SAME_ERROR_SECONDS", 0.0)
    node, plugins = SimulatedNode(load("h200")), directory / "device-plugins"
    (uuid,) = (gpu.uuid for gpu in node.profile.gpus)
    async with StandInKubelet(plugins) as kubelet:
        async with running(directory, node, device_plugin_dir=str(plugins)) as (daemon, _driver, _status):
            await kubelet.wait_for(healthy(kubelet, 1))
            real, told = daemon._health.observe, []

            def observe(of, seen):
                told.append(seen)
                return real(of, seen)

            monkeypatch.setattr(daemon._health, "observe", observe)
            for pod in ("one", "two"):
                await kubelet.admit(pod, {GPU: 1})
                for _ in range(5):
                    node.post(0, 8, 31)
                    expected = [ApplicationError(31, frozenset({f"default/{pod}"}))] * 5
                    before = sum(isinstance(seen, ApplicationError) for seen in told)
                    with anyio.fail_after(10):
                        while sum(isinstance(seen, ApplicationError) for seen in told) == before:
                            await anyio.sleep(0.01)
                assert [seen for seen in told if isinstance(seen, ApplicationError)][-5:] == expected
                kubelet.release(pod)
            (gpu,) = (await status_of(directory)).gpus
            assert (gpu.uuid, gpu.healthy, gpu.verdict) == (uuid, True, "DEGRADED")
            assert any("suspected wedged GPU" in signal.detail for signal in gpu.signals)
        kubelet.check()


async def test_an_order_that_cannot_be_written_is_in_force_and_answered_with_an_error(
    kubelet, directory, node, monkeypatch
):
    monkeypatch.setattr(recorder, "RETRY", 0.05)
    monkeypatch.setattr(recorder, "WRITTEN_SOON", 0.2)
    async with running(directory, node):
        await kubelet.wait_for(healthy(kubelet, 8))
        real = os.pwrite
        full = threading.Event()
        full.set()

        def pwrite(*arguments):
            if full.is_set():
                raise OSError(errno.EROFS, "Read-only file system")
            return real(*arguments)

        monkeypatch.setattr(os, "pwrite", pwrite)
        with pytest.raises(control.ControlError, match=r"is cordoned.*But this could not be written"):
            await ask(directory, "cordon", gpu=1)
        await kubelet.wait_for(healthy(kubelet, 7))

        async def trouble():
            return (await ask(directory, "status"))["state"]["trouble"]

        assert "would be lost at a restart" in await trouble()
        full.clear()

        async def written():
            return "cordon" in str(stored(directory / "state", HEALTH))

        await until_true(written)

        async def mended():
            return not await trouble()

        await until_true(mended)
    async with running(directory, node):
        await kubelet.wait_for(healthy(kubelet, 7))


async def test_a_hanging_call_during_a_release_is_an_error_and_delays_nothing(kubelet, directory, node, monkeypatch):
    monkeypatch.setattr(monitor, "PATIENCE", 0.3)
    async with running(directory, node, nvml_timeout="100ms") as (_daemon, _driver, _status):
        await kubelet.wait_for(healthy(kubelet, 8))
        node.hang(3, 3600)
        try:
            await kubelet.wait_for(healthy(kubelet, 7))
            with pytest.raises(control.ControlError, match="held back for maintenance, but the driver's handles"):
                await ask(directory, "release", gpu=3)
            await kubelet.admit("pod", {GPU: 7})
        finally:
            node.heal(3)


async def test_an_automatic_strategy_is_chosen_again_with_each_configuration(kubelet, directory, monkeypatch, caplog):
    caplog.set_level("INFO")
    found = [NodeEvidence(trouble="nothing is known")]
    monkeypatch.setattr(process, "configure", lambda *_: None)  # it would keep log records from this test
    monkeypatch.setattr(process, "ListStrategy", lambda: ListStrategy(lambda _: found[0]))
    asked = {
        "simulate": "t4-4",
        "device_list_strategy": "auto",
        "cdi_dir": str(directory / "cdi"),
        "device_plugin_dir": str(directory),
        "state_dir": str(directory / "state"),
    }
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(process.serve, resolve(asked, {}), lambda _: resolve(asked, {}))
        await kubelet.wait_for(lambda: GPU in kubelet.resources and kubelet.resources[GPU].allocatable > 0)
        before = (await kubelet.admit("before", {GPU: 1})).allocations[0].response
        assert before.envs["NVIDIA_VISIBLE_DEVICES"].startswith("GPU-")
        told = await answers(directory, "status")
        assert told["device_list_strategy"] == {"used": ["envvar"], "reason": "auto: nothing is known"}
        read_there = CriSection("/etc/containerd/config.toml", spec_dirs=(str(directory / "cdi"),))
        found[0] = NodeEvidence(
            kubelet=KubeletEvidence("1.31.2"),
            sockets=("/run/containerd/containerd.sock",),
            containerd={"containerd": ContainerdEvidence("/etc/containerd/config.toml", 3, (read_there,))},
        )
        os.kill(os.getpid(), signal.SIGHUP)

        async def chosen_again():
            return (await ask(directory, "status"))["device_list_strategy"]["used"] == ["cdi-cri"]

        await until_true(chosen_again)

        async def by_name():
            """Return true if a pod gets its GPU by CDI name. No pod is refused before the specification is written."""
            if "after" in kubelet.pods:
                kubelet.release("after")
            return (await kubelet.admit("after", {GPU: 1})).allocations[0].response.cdi_devices

        await until_true(by_name)
        after = (await kubelet.admit("last", {GPU: 1})).allocations[0].response
        assert not after.envs
        assert after.cdi_devices[0].startswith("k8s.device-plugin.nvidia.com/gpu=GPU-")
        tasks.cancel_scope.cancel()
    assert caplog.text.count("device list strategy: envvar (auto: nothing is known)") == 1
    assert (
        caplog.text.count("device list strategy: cdi-cri (auto: the kubelet's package is of version 1.31.2, and") == 1
    )


@pytest.mark.parametrize("kubelet_comes", [True, False])
async def test_the_first_specifications_wait_a_limited_time_for_the_registration(
    directory, node, monkeypatch, kubelet_comes
):
    built: list[bool] = []
    monkeypatch.setattr(cdi_watch, "FIRST_SPECS", 30 if kubelet_comes else 0.05)
    async with running(directory, node, device_list_strategy="cdi-cri", cdi_dir=str(directory / "cdi")) as (daemon, *_):

        def build(*_):
            built.append(daemon._specs.registered.is_set())
            raise OSError(5, "Input/output error", "/driver-root")

        monkeypatch.setattr(SpecSource, "build", build)
        with anyio.fail_after(10):
            while not daemon.store.current.version:
                await daemon.store.changed.wait()
            if kubelet_comes:
                await anyio.sleep(0.2)
                assert built == []
                async with StandInKubelet(directory) as kubelet:
                    await kubelet.wait_for(lambda: GPU in kubelet.resources)
            while not built:
                await anyio.sleep(0.01)
    assert built[0] is kubelet_comes


@pytest.mark.parametrize("strategy", ["envvar", "cdi-cri"])
async def test_unusable_devices_do_not_count_as_held_back_by_an_order(kubelet, directory, node, monkeypatch, strategy):
    monkeypatch.setattr(cdi_watch, "FIRST_SPECS", 0.05)

    def build(*_):
        raise OSError(5, "Input/output error", "/driver-root")

    monkeypatch.setattr(SpecSource, "build", build)
    async with running(directory, node, device_list_strategy=strategy, cdi_dir=str(directory / "cdi")):
        await kubelet.wait_for(healthy(kubelet, 8 if strategy == "envvar" else 0))
        await ask(directory, "cordon", gpu=1)
        status = await ask(directory, "status")
    assert status["resources"][GPU]["held_back"] == (1 if strategy == "envvar" else 0)


async def test_another_directory_of_specifications_is_refused_while_the_daemon_runs(directory, node, monkeypatch):
    async with running(directory, node) as (daemon, _, _status):
        await answers(directory, "status")
        monkeypatch.setattr(daemon.configuration, "_resolve", lambda _: replace(daemon.settings, cdi_dir="/elsewhere"))
        daemon.configuration.request_read()
        await until(lambda: daemon.configuration.status().refused)
        assert daemon.settings.cdi_dir != "/elsewhere"


@asynccontextmanager
async def probed(daemon):
    """Give functions that return the answers of the daemon's probes, by path."""
    probes = Probes(daemon._view.facts)
    probes.status = daemon._answers.scraped
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(probes.beat)
        await anyio.lowlevel.checkpoint()
        yield {path: partial(page, Request(path)) for path, page in probes.pages.items()}
        tasks.cancel_scope.cancel()


async def until_told(page, text):
    with anyio.fail_after(10):
        while text not in (answer := await page()).text:
            await anyio.sleep(0.01)
    return answer.status


async def test_without_a_driver_all_probes_succeed_with_the_reason(directory, node):
    node.refuse("open", Return.DRIVER_NOT_LOADED, times=1000)
    async with running(directory, node) as (daemon, _, _status), probed(daemon) as pages:
        assert await until_told(pages["/startupz"], "[+]driver ok: the NVIDIA driver cannot be used: ") == 200
        assert await until_told(pages["/readyz"], "[+]driver ok: the NVIDIA driver cannot be used: ") == 200
        assert await until_told(pages["/readyz"], "[+]resources ok: no resource is served") == 200
        assert (await pages["/livez"]()).status == 200
        assert (await pages["/metrics"]()).status == 200


async def test_the_startup_probe_waits_for_the_first_answer_of_the_driver(directory, node, monkeypatch):
    answered = threading.Event()
    real = SimulatedDriver.open
    monkeypatch.setattr(SimulatedDriver, "open", lambda self: (answered.wait(), real(self))[1])
    async with running(directory, node) as (daemon, _, _status), probed(daemon) as pages:
        asking = "[-]driver failed: the first attempt to find GPUs is not over yet"
        assert await until_told(pages["/startupz"], asking) == 503
        assert (await pages["/livez"]()).status == 200
        (problem,) = (await answers(directory, "status"))["problems"]
        assert problem["kind"] == "driver-silent"
        answered.set()
        assert await until_told(pages["/startupz"], "[+]driver ok\n") == 200


async def test_the_liveness_probe_fails_with_a_silent_socket(kubelet, directory, node, monkeypatch):
    async with running(directory, node) as (daemon, _, _status), probed(daemon) as pages:
        await kubelet.wait_for(healthy(kubelet, 8))
        assert (await pages["/livez"]()).status == 200
        monkeypatch.setattr(probes_module, "FRESH", 0.0)
        monkeypatch.setattr(probes_module, "PATIENCE", 0.05)
        monkeypatch.setattr("gpu_plugin.kubelet.service.OPTIONS", None)  # no answer can be encoded from this
        assert (await pages["/livez"]()).status == 503
        assert await until_told(pages["/livez"], f"[-]sockets failed: {GPU}: ") == 503


async def short_turns(running, monkeypatch):
    """Make the monitor's turn overdue after 0.2 seconds."""
    monkeypatch.setattr(monitor, "longest_turn", lambda *_: 0.2)
    await until(lambda: running.turn_due <= anyio.current_time() + 1)


async def test_the_liveness_probe_fails_with_a_blocked_monitor(kubelet, directory, node, monkeypatch):
    async with running(directory, node) as (daemon, _, _status), probed(daemon) as pages:
        await kubelet.wait_for(healthy(kubelet, 8))
        await short_turns(daemon._now.monitor, monkeypatch)
        monkeypatch.setattr(type(daemon._now.monitor), "_turn", lambda *_: anyio.sleep_forever())
        assert await until_told(pages["/livez"], "[-]gpu-looks failed: the turn of the GPUs is ") == 503
        assert (await pages["/readyz"]()).status == 200


async def test_the_liveness_probe_fails_with_a_monitor_that_always_fails(kubelet, directory, node, monkeypatch):
    monkeypatch.setattr("gpu_plugin.runtime.supervision.FIRST_RETRY", 0.01)
    async with running(directory, node) as (daemon, _, _status), probed(daemon) as pages:
        await kubelet.wait_for(healthy(kubelet, 8))
        await short_turns(daemon._now.monitor, monkeypatch)

        async def fail(*_):
            raise RuntimeError("it fell over")

        monkeypatch.setattr(type(daemon._now.monitor), "_turn", fail)
        assert await until_told(pages["/livez"], "[-]gpu-looks failed: ") == 503


@pytest.mark.parametrize("when", ["before", "after"])
async def test_the_readiness_probe_reports_the_loss_of_all_gpus(directory, node, when):
    gpus = range(8)
    for gpu in gpus if when == "before" else ():
        node.lose(gpu)
    async with running(directory, node) as (daemon, _, _status), probed(daemon) as pages:
        if when == "after":
            await until_told(pages["/readyz"], "[+]resources ok\n")
            node.lose(3)
            await until(lambda: daemon.store.current.resources[GPU].resource.devices[3].reason)
            assert "[+]driver ok\n" in (await pages["/readyz"]()).text
            for gpu in gpus:
                node.lose(gpu)
        await until_told(pages["/readyz"], "[+]driver ok: none of the 8 GPUs answers\n")
        assert (await pages["/livez"]()).status == 200
        assert (await pages["/startupz"]()).status == 200
        for gpu in gpus:
            node.heal(gpu)
        await until_told(pages["/readyz"], "[+]driver ok\n")


async def test_the_readiness_probe_reports_a_refused_configuration(directory, node, monkeypatch):
    async with running(directory, node) as (daemon, _, _status), probed(daemon) as pages:
        await until_told(pages["/readyz"], "[+]configuration ok\n")

        def refuse(_):
            raise ConfigError("config.yaml:3: no such key")

        monkeypatch.setattr(daemon.configuration, "_resolve", refuse)
        daemon.configuration.request_read()
        await until_told(
            pages["/readyz"],
            "[+]configuration ok: the former configuration is in force; refused: config.yaml:3: no such key\n",
        )


@pytest.mark.parametrize("generation", ["1.36", "1.37"])
@pytest.mark.parametrize("ids", ["the same ids", "ids of its own", "some of the same ids"])
async def test_a_resource_returns_after_another_plugin_served_it(directory, node, monkeypatch, ids, generation):
    monkeypatch.setattr(takeover, "INTERVAL", 0.02)
    monkeypatch.setattr(takeover, "CONFIRM", 0.02)
    plugins = directory / "device-plugins"
    async with StandInKubelet(plugins, generation=generation) as kubelet:  # noqa: SIM117 - the daemon ends first
        async with running(directory, node, device_plugin_dir=str(plugins)) as (daemon, _driver, _status):
            await kubelet.wait_for(healthy(kubelet, 8))
            served = daemon.store.current.resources[GPU].resource.devices
            if ids == "ids of its own":
                served = tuple(replace(device, id=device.id[4:]) for device in served)
            if ids == "some of the same ids":
                served = served[:5]
            others = SnapshotStore()
            others.publish({GPU: ResourceView.of(Resource(GPU, served), Access(), Placement())})
            foreign = ResourceEndpoint(GPU, Shared(others, plugins / "kubelet.sock", plugins, Pulse()))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(foreign.run)
                await kubelet.wait_for(lambda: kubelet.registrations[GPU].accepted == 2)
                if ids == "ids of its own":
                    await until(lambda: "another plugin" in daemon._registrations.of(GPU).why)
                tasks.cancel_scope.cancel()
            if generation == "1.36":
                await kubelet.wait_for(lambda: kubelet.registrations[GPU].accepted == 3)
            elif (
                ids == "ids of its own"
            ):  # the kubelet keeps these devices until this plugin gets a request for any of them
                await kubelet.wait_for(lambda: kubelet.resources[GPU].streams == 1)
                with pytest.raises(AdmissionError, match="unknown device"):
                    await kubelet.admit("first", {GPU: 1})
            elif ids == "some of the same ids":
                await kubelet.wait_for(lambda: kubelet.resources[GPU].streams == 1)
                with anyio.fail_after(5):
                    while kubelet.resources[GPU].allocatable == 5:
                        await kubelet.admit("first", {GPU: 1})
                        kubelet.release("first")
                        await anyio.sleep(0.01)
            await kubelet.wait_for(healthy(kubelet, 8))
            await kubelet.admit("next", {GPU: 8})
            await until(lambda: daemon._registrations.of(GPU).registered is not None)


STATE_FILES = (
    *FILES,
    "daemon.lock",
    "control.sock",
)


def renamed(state):
    state.rename(state.with_name("away"))


def removed(state):
    shutil.rmtree(state, ignore_errors=True)  # the daemon may write again at the same time


def emptied(state):
    for file in state.iterdir():
        file.unlink()


async def test_a_control_socket_that_cannot_be_made_is_tried_again_soon(directory, node, monkeypatch):
    refusals = ["the directory is gone"]

    def refused(state_dir, verbs):
        if refusals:
            raise ConfigError(refusals.pop())
        return server.serve(state_dir, verbs)

    monkeypatch.setattr(commands, "serve", refused)
    async with running(directory, node):
        await until((directory / "state" / control.SOCKET).is_socket)
        assert len((await status_of(directory)).gpus) == 8


def one_gone(name):
    return pytest.param(lambda state: (state / name).unlink(), id=name)


@pytest.mark.parametrize("happens", [renamed, removed, emptied, *map(one_gone, STATE_FILES)])
async def test_removed_state_is_written_again_and_commands_are_answered(kubelet, directory, node, happens, monkeypatch):
    state = directory / "state"

    def signals():
        return {entry["signal"] for entry in (stored(state, HEALTH) or {"evidence": ()})["evidence"]}

    async with running(directory, node, health_poll_interval="1h") as (daemon, _driver, _status):
        await kubelet.wait_for(healthy(kubelet, 8))
        node.raise_xid(2, 79)
        await kubelet.wait_for(healthy(kubelet, 7))
        await ask(directory, "cordon", gpu=1)
        await kubelet.wait_for(healthy(kubelet, 6))
        with anyio.fail_after(10):  # until all state is written
            while "cordon" not in signals() or not stored(state, DEVICES) or not stored(state, EVENT):
                await anyio.sleep(0.01)
        kept: list[object] = []

        def keep(file):
            kept.append(file)
            return True

        monkeypatch.setattr(daemon.configuration._source, "keep", keep)
        await anyio.to_thread.run_sync(happens, state)
        await until(lambda: all(os.path.lexists(state / name) for name in STATE_FILES))
        with anyio.fail_after(10):
            while not kept:  # the chosen file of the label's directory
                await anyio.sleep(0.01)
        assert len((await status_of(directory)).gpus) == 8
        with anyio.fail_after(10):  # the stored state, as after a SIGKILL
            while not {"cordon", "xid"} <= signals():
                await anyio.sleep(0.01)
            while not any(event["kind"] == "order" for event in stored(state, EVENT)):
                await anyio.sleep(0.01)


BASE = resolve({}, {})


async def test_the_device_plugin_directory_is_refused_as_state_directory(directory, tmp_path):
    (tmp_path / "link").symlink_to(directory)
    for state in (directory, tmp_path / "link", directory / "x" / ".."):
        settings = resolve({"device_plugin_dir": str(directory), "state_dir": str(state)}, {})
        with pytest.raises(
            ConfigError, match=r"is the device plugin directory, from which the kubelet removes all files"
        ):
            await process.serve(settings, lambda _: BASE)
    assert not (directory / "daemon.lock").exists()


IN_THE_WAY = {
    "file": lambda path: path.write_text(""),
    "directory": lambda path: (path / "full").mkdir(parents=True),
    "link": lambda path: path.symlink_to("/etc/passwd"),
}


@pytest.mark.parametrize("kind", IN_THE_WAY)
@pytest.mark.parametrize("kept", [0, 1])
async def test_other_files_at_the_path_of_the_control_socket_are_moved_away(directory, node, kind, kept, caplog):
    socket = directory / "state" / "control.sock"
    socket.parent.mkdir()
    IN_THE_WAY[kind](socket)
    if kept:
        IN_THE_WAY["directory"](socket.with_name("control.sock.corrupt"))
    async with running(directory, node):
        assert (await answers(directory, "status"))["waiting"] == ""
    end = ".corrupt.1" if kept else ".corrupt"
    assert os.path.lexists(f"{socket}{end}")
    assert f"not a file of this plugin (kept as {socket}{end})" in caplog.text


async def test_only_one_of_two_daemons_registers_once_the_directory_appears(directory):
    plugins = directory / "device-plugins"
    flags = {"device_plugin_dir": str(plugins)}
    nodes = [SimulatedNode(load("hgx-h100")) for _ in range(2)]
    async with (
        running(directory, nodes[0], **flags, state_dir=str(directory / "a")) as (first, _driver, one),
        running(directory, nodes[1], **flags, state_dir=str(directory / "b")) as (second, _other, two),
    ):
        await until(lambda: first.store.current.resources and second.store.current.resources)
        async with StandInKubelet(directory) as kubelet:
            plugins.symlink_to(directory)  # the directory appears together with its kubelet
            await kubelet.wait_for(healthy(kubelet, 8))
            await until(lambda: one or two)
            assert kubelet.registrations[GPU].accepted == 1
        assert [*one, *two] == [1]
