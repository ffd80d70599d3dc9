"""Scrapes of a whole daemon on a simulated node, read by the parsers of Prometheus' client library."""

from collections import Counter

import anyio
import pytest

from demo.stand_in_kubelet import AdmissionError
from gpu_plugin.kubelet import attribution
from gpu_plugin.simulation import faults
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.profile import load
from tests.unit.daemon.test_process import GPU, ask, healthy, running
from tests.unit.telemetry.test_metrics import read, read_once

SLICE = "nvidia.com/mig-1g.10gb"


class Scrape:
    """The samples of one scrape."""

    def __init__(self, samples):
        self.samples: dict[str, dict[frozenset[tuple[str, str]], float]] = {name: {} for name, _ in samples}
        for (name, labels), value in samples.items():
            self.samples[name][labels] = value

    def of(self, name, **labels):
        """Return the values of the samples with these labels."""
        wanted = {(label, str(value)) for label, value in labels.items()}
        return [value for told, value in self.samples.get(name, {}).items() if wanted <= told]

    def gpu(self, index, name, **labels):
        """Return the value of the only sample of a GPU with these labels."""
        (value,) = self.of(f"gpu_plugin_gpu_{name}", index=index, **labels)
        return value


async def status(daemon):
    """Return the status for a scrape, and the devices that containers hold, as a list."""
    found, held = await daemon._answers.scraped()
    return found, [*held]


async def scrape(daemon, by=read_once):
    return Scrape(by(*await status(daemon)))


async def until(daemon, met):
    """Return the first scrape for which `met` is true."""
    with anyio.fail_after(30):
        while not met(told := await scrape(daemon)):
            await anyio.sleep(0.05)
    assert read(*await status(daemon))
    return told


async def test_a_whole_node(kubelet, directory, node):
    async with running(directory, node) as (daemon, driver, _):
        await kubelet.wait_for(healthy(kubelet, 8))
        told = await scrape(daemon, by=read)
        assert driver.calls["temperature"]
    assert len(told.of("gpu_plugin_gpu_info", model="NVIDIA H100 80GB HBM3", driver="580.159.04")) == 8
    assert told.of("gpu_plugin_gpu_info", index=0, pci_bus_id="0000:1b:00.0") == [1]
    assert sorted(told.of("gpu_plugin_gpu_health", index=3)) == [0, 0, 1]
    assert told.of("gpu_plugin_devices", resource=GPU, state="healthy") == [8]
    assert told.of("gpu_plugin_registered", resource=GPU) == [1]
    assert told.of("gpu_plugin_registrations_total", resource=GPU, result="accepted") == [1]
    assert told.of("gpu_plugin_registrations_total", resource=GPU, result="failed") == [0]
    assert told.of("gpu_plugin_list_streams", resource=GPU) == [1]
    assert told.of("gpu_plugin_lists_sent_total", resource=GPU)[0] >= 1
    assert told.of("gpu_plugin_rpc_duration_seconds_count", method="GetDevicePluginOptions")[0] >= 1
    assert told.of("gpu_plugin_allocated_devices_total", resource=GPU) == [0]
    assert told.of("gpu_plugin_driver_up") == told.of("gpu_plugin_state_written") == [1]
    assert told.of("gpu_plugin_gpus_missing") == [0]
    assert told.of("gpu_plugin_waiting") == told.of("gpu_plugin_nvml_calls_hanging") == [0]
    assert told.of("gpu_plugin_snapshot_version")[0] >= 1
    assert told.of("gpu_plugin_nvml_call_duration_seconds_count", call="temperature")[0] >= 8
    assert told.of("gpu_plugin_nvml_call_duration_seconds_count", call="wait") == []
    table = daemon._health.ledger.policy.xids.table
    assert set(told.of("gpu_plugin_xid_errors_total", index=5)) == {0}
    assert len(told.of("gpu_plugin_xid_errors_total", index=5)) == len(table) > 100
    assert told.gpu(0, "temperature_threshold_celsius", threshold="shutdown") == 95
    assert told.gpu(0, "power_limit_watts") == 700
    assert told.gpu(0, "power_watts") == 70
    assert told.gpu(0, "memory_total_bytes") == 85520809984
    assert told.gpu(0, "nvlinks", state="active") == 18


async def test_each_reading_moves_with_its_fault(kubelet, directory, node):
    def fault(gpu, **what):
        faults.apply(node, {"gpu": gpu, **{name.replace("_", "-"): value for name, value in what.items()}})

    async with running(directory, node) as (daemon, _, _):
        await kubelet.wait_for(healthy(kubelet, 8))
        calm = await scrape(daemon)
        fault(0, temperature=91)
        node.change(0, watts=345, utilization=80, memory_used=2**30)
        fault(1, memory_temperature=77)
        fault(1, clocks_event_reasons=0x44)
        fault(2, ecc_uncorrected=3)
        fault(2, remap_pending=True)
        fault(2, sram_threshold=True)
        fault(3, xid=79)
        fault(4, nvlink_down=0)
        fault(4, nvlink_crc_errors=7)
        fault(4, nvlink_errors=1)
        fault(5, pcie_width=8)
        fault(5, pcie_replays=5)
        fault(5, pcie_fatal_errors=2)
        fault(5, fabric="in-progress")
        fault(6, recovery_action="gpu-reset")
        fault(6, unrepairable_memory=True)
        fault(6, remap_failure=True)
        fault(7, lost=True)  # at once: the event set that goes with it has GPU 3's Xid in it
        sick = await until(
            daemon,
            lambda told: (
                told.of("gpu_plugin_devices", resource=GPU, state="unhealthy") == [5]
                and told.of("gpu_plugin_gpu_utilization_ratio", index=0) == [0.8]
                and told.of("gpu_plugin_gpu_memory_used_bytes", index=0) == [2**30]
                and told.of("gpu_plugin_gpu_pcie_link_lanes", index=5) == [8]
                and told.of("gpu_plugin_gpu_nvlink_crc_errors_total", index=4) == [7]
                and told.of("gpu_plugin_gpu_nvlink_failed_recoveries_total", index=4) == [1]
                and told.of("gpu_plugin_gpu_unrepairable_memory", index=6) == [1]
                and told.of("gpu_plugin_gpu_sram_threshold_exceeded", index=2) == [1]
                and told.of("gpu_plugin_gpu_temperature_celsius", index=0) == [91]
                and told.of("gpu_plugin_xid_errors_total", index=3, xid=79) == [1]
            ),
        )
        lost = await until(daemon, lambda told: not told.of("gpu_plugin_gpu_temperature_celsius", index=7))
    assert calm.gpu(0, "temperature_celsius") == 32
    assert calm.gpu(0, "utilization_ratio") == 0
    assert sick.gpu(0, "power_watts") == 345
    assert sick.gpu(1, "memory_temperature_celsius") == 77
    assert [sick.gpu(1, "clocks_event", reason=reason) for reason in ("hw_thermal_slowdown", "sw_power_cap")] == [1, 1]
    assert sick.gpu(1, "clocks_event", reason="hw_power_brake") == 0
    assert sick.gpu(2, "ecc_uncorrected_errors_total") == 3
    assert [sick.gpu(2, name) for name in ("row_remap_pending", "row_remap_failure")] == [1, 0]
    assert sick.gpu(2, "remapped_rows", cause="uncorrectable") == 1
    assert sick.gpu(2, "signal_verdict", signal="sram-threshold") == 3
    assert sick.of("gpu_plugin_xid_errors_total", index=3, xid=79) == [1]
    assert sick.of("gpu_plugin_health_transitions_total", index=3, signal="xid", verdict="fatal") == [1]
    assert sick.gpu(3, "health", state="unhealthy") == 1
    assert sick.gpu(3, "health_since_timestamp_seconds") > 1.6e9
    assert [sick.gpu(4, "nvlinks", state=state) for state in ("active", "inactive")] == [17, 1]
    assert sick.gpu(5, "pcie_link_max_lanes") == 16
    assert sick.gpu(5, "pcie_replays_total") == 5
    assert sick.gpu(5, "pcie_fatal_errors_total") == 2
    assert [sick.gpu(5, "fabric_state", state=state) for state in ("in_progress", "completed")] == [1, 0]
    assert [sick.gpu(6, "recovery_action", action=action) for action in ("gpu_reset", "none")] == [1, 0]
    assert sick.gpu(6, "row_remap_failure") == 1
    assert lost.gpu(7, "health", state="unhealthy") == 1
    assert lost.gpu(7, "temperature_threshold_celsius", threshold="shutdown") == 95
    assert lost.of("gpu_plugin_nvml_call_errors_total", code="gpu_is_lost")


async def test_a_call_that_hangs_is_counted_while_it_does(kubelet, directory, node):
    # Other calls of a busy machine come back within this time.
    async with running(directory, node, nvml_timeout="3s") as (daemon, _, _):
        await kubelet.wait_for(healthy(kubelet, 8))
        node.hang(2, 3600.0)
        told = await until(daemon, lambda told: told.of("gpu_plugin_nvml_calls_hanging") == [1])
        assert sum(told.of("gpu_plugin_nvml_calls_hung_total")) == 1
        node.heal(2)
        told = await until(daemon, lambda told: told.of("gpu_plugin_nvml_calls_hanging") == [0])
        assert sum(told.of("gpu_plugin_nvml_calls_hung_total")) == 1


async def test_a_scrape_asks_the_driver_nothing(kubelet, directory, node):
    async with running(directory, node, health_poll_interval="1h") as (daemon, driver, _):
        await kubelet.wait_for(healthy(kubelet, 8))
        await anyio.sleep(0.2)  # the rest of the first turn

        def calls():
            return Counter({call: count for call, count in driver.calls.items() if call != "wait"})

        before = calls()
        for _ in range(3):
            await scrape(daemon)
        assert calls() == before


async def test_pods_are_named_while_they_hold_devices(kubelet, directory, node, monkeypatch):
    monkeypatch.setattr(attribution, "AGE", 0.0)
    async with running(directory, node) as (daemon, _, _):
        await kubelet.wait_for(healthy(kubelet, 8))
        first = await kubelet.admit("first", {GPU: 2})
        await kubelet.admit("second", {GPU: 1})
        with pytest.raises(AdmissionError):
            await kubelet.admit("third", {GPU: 9})
        told = await until(daemon, lambda told: len(told.of("gpu_plugin_pod_device")) == 3)
        of_first = [dict(labels) for labels in told.samples["gpu_plugin_pod_device"] if ("pod", "first") in labels]
        assert sorted(labels["device"] for labels in of_first) == sorted(first.ids)
        assert all(labels["uuid"] == labels["device"] and labels["resource"] == GPU for labels in of_first)
        assert {labels["namespace"] for labels in of_first} == {"default"}
        assert told.of("gpu_plugin_pod_attribution_up") == [1]
        assert told.of("gpu_plugin_allocate_requests_total", resource=GPU) == [2]
        assert told.of("gpu_plugin_allocated_devices_total", resource=GPU) == [3]
        assert told.of("gpu_plugin_rpc_duration_seconds_count", method="Allocate") == [2]
        kubelet.release("first")
        told = await until(daemon, lambda told: len(told.of("gpu_plugin_pod_device")) == 1)
        assert told.of("gpu_plugin_pod_device", pod="second") == [1]
        kubelet.release("second")
        await until(daemon, lambda told: "gpu_plugin_pod_device" not in told.samples)


async def test_a_mig_device_is_told_with_its_gpu(kubelet, directory):
    node = SimulatedNode(load("h100-mig-single"))
    async with running(directory, node, mig_strategy="mixed") as (daemon, _, _):
        await kubelet.wait_for(lambda: SLICE in kubelet.resources and kubelet.resources[SLICE].allocatable == 56)
        pod = await kubelet.admit("pod", {SLICE: 1})
        told = await until(daemon, lambda told: "gpu_plugin_pod_device" in told.samples)
        ((labels, _),) = told.samples["gpu_plugin_pod_device"].items()
        (gpu,) = [gpu for gpu in daemon._health.gpus if pod.ids[0] in {mig.uuid for mig in gpu.mig_devices}]
        expected = {"device": pod.ids[0], "uuid": gpu.uuid, "index": str(gpu.index), "pod": "pod", "resource": SLICE}
        assert expected.items() <= dict(labels).items()
        assert told.of("gpu_plugin_gpu_utilization_ratio") == [], "of a GPU in MIG mode NVML does not say"
        kubelet.release("pod")


async def test_without_pod_resources_all_else_is_told_and_that_is_said(kubelet, directory, node):
    absent = {"pod_resources_socket": str(directory / "nobody.sock")}
    async with running(directory, node, **absent) as (daemon, _, _):
        await kubelet.wait_for(healthy(kubelet, 8))
        told = await scrape(daemon)
    assert told.of("gpu_plugin_pod_attribution_up") == [0]
    assert told.of("gpu_plugin_pod_resources_requests_total", result="failed")[0] >= 1
    assert told.of("gpu_plugin_devices", state="healthy") == [8]


async def test_an_answer_that_is_followed_by_none_stays_for_a_while_and_that_is_said(
    kubelet, directory, node, monkeypatch
):
    monkeypatch.setattr(attribution, "AGE", 0.0)
    monkeypatch.setattr(attribution, "FIRST_PAUSE", 0.0)
    socket = directory.parent / "pod-resources/kubelet.sock"
    async with running(directory, node) as (daemon, _, _):
        await kubelet.wait_for(healthy(kubelet, 8))
        await kubelet.admit("train", {GPU: 2})
        await until(daemon, lambda told: len(told.of("gpu_plugin_pod_device", pod="train")) == 2)
        socket.rename(away := socket.with_name("away.sock"))  # the kubelet lives, and its service cannot be reached
        told = await until(daemon, lambda told: told.of("gpu_plugin_pod_attribution_up") == [0])
        assert len(told.of("gpu_plugin_pod_device", pod="train")) == 2
        assert told.of("gpu_plugin_pod_resources_requests_total", result="failed")[0] >= 1
        monkeypatch.setattr(attribution, "STALE", 0.0)
        told = await scrape(daemon)
        assert (told.of("gpu_plugin_pod_attribution_up"), told.of("gpu_plugin_pod_device")) == ([0], [])
        monkeypatch.setattr(attribution, "STALE", 60.0)
        away.rename(socket)
        told = await until(daemon, lambda told: told.of("gpu_plugin_pod_attribution_up") == [1])
        assert len(told.of("gpu_plugin_pod_device", pod="train")) == 2


async def test_devices_that_an_order_alone_holds_back_are_counted(kubelet, directory, node):
    async with running(directory, node) as (daemon, _, _):
        await kubelet.wait_for(healthy(kubelet, 8))
        assert (await scrape(daemon)).of("gpu_plugin_devices_held_back", resource=GPU) == [0]
        for index in (2, 5):
            await ask(directory, "cordon", gpu=index)
        node.lose(3)
        told = await until(daemon, lambda told: told.of("gpu_plugin_devices", resource=GPU, state="unhealthy") == [3])
        assert told.of("gpu_plugin_devices_held_back", resource=GPU) == [2]
        node.lose(5)
        await until(daemon, lambda told: told.of("gpu_plugin_devices_held_back", resource=GPU) == [1])


async def test_pods_are_not_named_where_that_is_switched_off(kubelet, directory, node):
    async with running(directory, node, pod_metrics="false") as (daemon, _, _):
        await kubelet.wait_for(healthy(kubelet, 8))
        told = await scrape(daemon)
        asked = daemon._attribution.questions
    assert asked == 0
    assert not [name for name in told.samples if name.startswith("gpu_plugin_pod_")]
