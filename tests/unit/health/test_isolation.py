"""A fault makes the devices of its hardware Unhealthy in the kubelet's list, and no others."""

from typing import Any

import msgspec
import pytest

from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.sharing import MPS, TIME_SLICING, SharedResource
from gpu_plugin.devices.node import Gpu, MigDevice, Node
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import DriverEvent, Fault, Observation, Order, Sample, XidEvent, facts
from gpu_plugin.health.policy import policy
from gpu_plugin.health.xid_table import XID_TABLE
from gpu_plugin.kubelet.inventory import Inventory
from gpu_plugin.kubelet.offer import offer
from gpu_plugin.kubelet.snapshot import SnapshotStore
from tests.unit.health.ledgers import SEEN

GPU, SLICE, PART = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "nvidia.com/mig-1c.3g.40gb"
SETTINGS = resolve({}, {})
# Xids: FATAL to the MIG device that it names, FATAL to the whole GPU (two), and an application's own
TIMEOUT, BUS, UNCONTAINED, PAGE_FAULT = 46, 79, 95, 31

LOST = Sample(fault=Fault.LOST, detail="the GPU is lost")


class Plugin:
    """The GPUs of a node with a ledger and an inventory."""

    def __init__(self, *gpus: Gpu, **settings: Any) -> None:
        asked = msgspec.structs.replace(SETTINGS, **settings)
        self.now = 1_000.0
        self.ledger = HealthLedger(policy(asked, XID_TABLE), "boot-1")
        for gpu in gpus:
            slices = {(mig.gpu_instance, mig.compute_instance): mig.uuid for mig in gpu.mig_devices}
            self.ledger.watch(gpu.uuid, facts(gpu), slices)
            self.ledger.observe(gpu.uuid, SEEN, self.now)
        self.inventory = Inventory(SnapshotStore(), self.ledger.health)
        self.inventory.apply(offer(Node(gpus), asked, "/"), None, 0)
        for resource in self.inventory.mps_resources:
            self.inventory.mps_changed(resource, "")

    def observe(self, gpu: str, *seen: Observation) -> set[str]:
        """Return the ids of the Unhealthy devices after these observations of a GPU."""
        for observation in seen:
            self.now += 5
            self.ledger.observe(gpu, observation, self.now)
            self.inventory.health_changed(gpu)
        return self.unhealthy

    @property
    def ids(self) -> list[str]:
        return [device.id for resource in self.inventory.listed for device in resource.devices]

    @property
    def unhealthy(self) -> set[str]:
        return {device.id for resource in self.inventory.listed for device in resource.devices if not device.healthy}

    @property
    def reasons(self) -> set[str]:
        found = {device.reason for resource in self.inventory.listed for device in resource.devices}
        return found - {""}


def four(name: str, strategy: str = TIME_SLICING) -> SharedResource:
    return SharedResource(name, name, 4, strategy)


def replicas(*uuids: str) -> set[str]:
    return {f"{uuid}::{number}" for uuid in uuids for number in range(4)}


def sevenfold(name: str, index: int) -> Gpu:
    """Return a GPU with seven MIG devices: GPU instances 7 to 13, with one compute instance each."""
    slices = tuple(MigDevice(f"MIG-{name}{at}", at, 7 + at, 0, "1g.10gb") for at in range(7))
    return Gpu(f"GPU-{name}", index, mig_enabled=True, mig_devices=slices)


def slices(name: str) -> set[str]:
    return replicas(*(f"MIG-{name}{at}" for at in range(7)))


@pytest.fixture
def cut():
    """Two GPUs with seven MIG devices each, of four replicas."""
    plugin = Plugin(sevenfold("a", 0), sevenfold("b", 1), mig_strategy="mixed", sharing=(four(SLICE),))
    assert len(plugin.ids) == 56
    assert plugin.unhealthy == set()
    return plugin


@pytest.fixture
def eight():
    """Eight GPUs that are not shared."""
    return Plugin(*(Gpu(f"GPU-{index}", index) for index in range(8)))


# A GPU in MIG mode


@pytest.mark.parametrize(
    "event",
    [
        XidEvent(TIMEOUT),
        XidEvent(BUS),
        XidEvent(BUS, 9, 0),  # the GPU is gone, although the driver names an instance
        XidEvent(UNCONTAINED, 9, 0),
        XidEvent(TIMEOUT, 3, 0),  # no such GPU instance
        LOST,
        DriverEvent(0x2000),
        Order("cordon"),
        Order("release"),
    ],
)
def test_a_fault_of_a_gpu_affects_all_its_devices_and_no_others(cut, event):
    assert cut.observe("GPU-a", event) == slices("a")
    assert len(cut.unhealthy) == 28
    assert len(cut.reasons) == 1


@pytest.mark.parametrize("at", range(7))
def test_a_fault_of_a_mig_device_affects_its_four_replicas_and_no_others(cut, at):
    assert cut.observe("GPU-a", XidEvent(TIMEOUT, 7 + at, 0)) == replicas(f"MIG-a{at}")
    assert cut.reasons == {"Xid 46 (GPU timeout)"}


def test_faults_of_mig_devices_add_up_and_an_applications_error_affects_none(cut):
    assert cut.observe("GPU-a", *[XidEvent(PAGE_FAULT, 7, 0)] * 20, *[XidEvent(PAGE_FAULT)] * 20) == set()
    assert cut.observe("GPU-a", XidEvent(TIMEOUT, 7, 0), XidEvent(TIMEOUT, 8, 0)) == replicas("MIG-a0", "MIG-a1")
    assert cut.observe("GPU-b", XidEvent(TIMEOUT, 7, 0)) == replicas("MIG-a0", "MIG-a1", "MIG-b0")
    assert cut.observe("GPU-a", XidEvent(BUS)) == slices("a") | replicas("MIG-b0")


# GPUs that are not cut


@pytest.mark.parametrize("strategy", [TIME_SLICING, MPS])
def test_the_replicas_of_a_gpu_are_unhealthy_together(strategy):
    shared = Plugin(Gpu("GPU-a", 0), Gpu("GPU-b", 1), sharing=(four(GPU, strategy),), mps_root="/run/mps")
    assert len(shared.ids) == 8
    assert shared.unhealthy == set()
    assert shared.observe("GPU-b", Sample(counting=0, energy=9_000), XidEvent(TIMEOUT)) == replicas("GPU-b")
    assert shared.observe("GPU-a", XidEvent(TIMEOUT)) == replicas("GPU-a", "GPU-b")
    assert shared.observe("GPU-b", *[Sample(counting=0, energy=at) for at in range(3)]) == replicas("GPU-a")


def test_a_fault_of_a_partitioned_gpu_does_not_affect_a_whole_gpu():
    mixed = Plugin(Gpu("GPU-w", 0), sevenfold("a", 1), mig_strategy="mixed", sharing=(four(GPU), four(SLICE)))
    assert mixed.observe("GPU-a", XidEvent(BUS)) == slices("a")
    assert mixed.observe("GPU-w", XidEvent(BUS)) == slices("a") | replicas("GPU-w")


def test_a_degraded_gpu_stays_healthy_in_the_list(eight):
    up, down = Sample(nvlinks=(True, True)), Sample(nvlinks=(True, False))
    assert eight.observe("GPU-1", up, down, down) == set()
    assert {key.signal for key, _, _ in eight.ledger.standing("GPU-1")} == {"nvlink"}
