"""What holds for all checks, and what no table of facts says."""

import msgspec
import pytest
from msgspec.structs import replace

from gpu_plugin.config.sharing import MPS, SharedResource
from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.doctor.checks import CHECKS, examine, examined
from gpu_plugin.doctor.edges.api import needed
from gpu_plugin.doctor.facts import (
    Daemon,
    DeviceNode,
    DeviceNodes,
    Driver,
    Facts,
    KernelModule,
    Mps,
    Pci,
    Unknown,
)
from tests.unit.doctor.made_up import (
    DIR,
    FAILED,
    GPU,
    HUNG,
    NOTE,
    OK,
    POD,
    SKIPPED,
    WARNING,
    driver,
    facts,
    gpu,
    nodes,
    status,
)


def mps_shared(given: Facts) -> Facts:
    entry = SharedResource(GPU, GPU, 4, MPS)
    return replace(given, settings=replace(given.settings, sharing=(entry,), mps_root="/run/nvidia/mps"))


def test_a_node_that_is_well_has_nothing_wrong():
    assert {found.status for _, found in examined(facts())} <= {OK, SKIPPED}


NO_LIBRARY = Driver(code=Return.LIBRARY_NOT_FOUND, trouble="dlopen: no libnvidia-ml.so.1")
NO_MODULE = Driver(code=Return.DRIVER_NOT_LOADED, trouble="nvmlInit_v2: Driver Not Loaded")
NO_NODES = DeviceNodes(
    {"/dev/nvidiactl": DeviceNode("/dev/nvidiactl"), "/dev/nvidia-uvm": DeviceNode("/dev/nvidia-uvm")}
)
BARE = {"pci": Pci(), "module": KernelModule(False), "driver": NO_LIBRARY, "nodes": NO_NODES}
UNREGISTERED = {"socket": f"{DIR}/kubelet.sock", "directory": DIR, "resources": {}}
NOTHING_SERVED = Daemon(status(kubelet=UNREGISTERED, resources={}, health={"gpus": []}))
GUESTS = Pci({"0000:10:00.0": "vfio-pci"})


@pytest.mark.parametrize(
    "differs",
    [
        {"daemon": Daemon(trouble="no daemon answers")},
        {"daemon": NOTHING_SERVED},
        {"daemon": NOTHING_SERVED, "driver": NO_MODULE},
        {"daemon": NOTHING_SERVED, "driver": driver(), "module": KernelModule(True, "580.95.05"), "pci": GUESTS},
        {"daemon": NOTHING_SERVED, "pci": GUESTS},
    ],
    ids=["no daemon", "daemon", "library", "driver of guests", "guests"],
)
def test_a_node_without_a_gpu_needs_no_driver(differs):
    found = examined(facts(**BARE | differs))
    assert {each.status for _, each in found} <= {OK, NOTE, SKIPPED}, found
    assert [each for _, each in found if each.status is NOTE and "has no NVIDIA GPU" in each.found]


@pytest.mark.parametrize(
    "differs",
    [
        {"pci": Pci({"0000:10:00.0": ""})},
        {"pci": Pci(dxg=True)},
        {"pci": Unknown("no PCI bus")},
        {"module": Unknown("not to be seen")},
        {"module": KernelModule(True, "580.95.05")},
        {"daemon": Daemon(status(missing=[{"name": "GPU 10:00.0", "uuid": "GPU-0", "why": "it is gone"}]))},
        {"driver": Driver(code=Return.UNKNOWN, trouble="nvmlInit_v2: Unknown Error")},
    ],
    ids=["on the bus", "WSL", "no bus", "module not seen", "module loaded", "had one", "another error"],
)
def test_a_driver_that_does_not_open_fails_where_there_may_be_a_gpu(differs):
    [found] = examine("driver-library", facts(**BARE | differs))
    assert found.status is FAILED


@pytest.mark.parametrize("unknown", [HUNG, Unknown("not to be seen")], ids=["hung", "unseen"])
@pytest.mark.parametrize("options", [{}, {"simulate": "hgx-h100"}], ids=["real", "simulated"])
def test_no_fact_is_taken_for_granted(unknown, options):
    """What cannot be seen fails nothing, and what hangs is said by at least one check, whichever fact it is."""
    gathered = [each.name for each in msgspec.structs.fields(Facts) if each.required]  # those without a default
    options = {**options, "device_list_strategy": "cdi-cri", "node_labels": "file", "imex_channel_ids": "0"}
    for name in gathered:
        if name == "settings":
            continue
        found = examined(facts(options=options, **{name: unknown}))
        failures = [each for _, each in found if each.status is FAILED]
        assert all(unknown.hung for _ in failures), (name, failures)
        if unknown.hung and not (options.get("simulate") and name in {"pci", "module", "fabric_manager"}):
            assert [each for _, each in found if unknown.why in each.found] or name in {"pci", "fabric_manager"}, name
    assert len(examined(facts(options=options, **dict.fromkeys(set(gathered) - {"settings"}, unknown)))) >= len(CHECKS)


def test_a_check_that_fails_takes_no_other_with_it():
    found = examined(facts(daemon=Daemon({"daemon": {}})))  # of a daemon that has another idea of a status
    stands = {name: each for name, each in found if each.status is WARNING}
    assert set(stands) == {"daemon", "registration"}
    assert "another version" in stands["daemon"].remedy
    assert len(found) == len(CHECKS)


def test_mps_that_is_wanted():
    up, down = {"/m/nvidia.com/gpu": True}, {"/m/nvidia.com/old": False}
    [missing] = examine("mps", mps_shared(facts(mps=Mps(root="/m"))))
    assert missing.status is WARNING
    assert "mps.enabled" in missing.remedy
    [well] = examine("mps", mps_shared(facts(mps=Mps((), up, "/m"), driver=driver(gpu(0, compute_mode=3)))))
    assert (well.status, well.found) == (OK, "1 MPS daemon below /m")
    [silent] = examine("mps", mps_shared(facts(mps=Mps((), up | down, "/m"))))
    assert silent.status is WARNING
    assert "/m/nvidia.com/old" in silent.found
    assert "/m/nvidia.com/gpu" not in silent.found
    [unseen] = examine("permissions", mps_shared(facts(process=POD)))
    assert (unseen.status, "hostPID" in unseen.found) == (NOTE, True)


def test_released_gpus_keep_their_nodes_closed():
    [found] = examine("device-nodes", facts(nodes=replace(nodes(), nodes={})))
    assert found.status is SKIPPED
    assert "maintenance" in found.found


def test_rights_are_those_of_the_options_that_are_on():
    on = {
        "node_name": "n",
        "node_events": True,
        "pod_events": True,
        "node_condition": True,
        "node_taint": "NoSchedule",
        "cordon_annotation": True,
        "node_labels": "api",
        "config_file_srcdir": "/configs",
    }
    said = {str(right): (right.needed_by, right.name) for right in needed(facts(options=on).settings)}
    assert said == {
        "get on nodes": ("--config-file-srcdir", "n"),
        "watch on nodes": ("--config-file-srcdir", "n"),
        "create on events in namespace default": ("--node-events", ""),
        "patch on events in namespace default": ("--node-events", ""),
        "create on events": ("--pod-events", ""),
        "patch on events": ("--pod-events", ""),
        "get on pods": ("--pod-events", ""),
        "patch on nodes/status": ("--node-condition", "n"),
        "patch on nodes": ("--node-taint", "n"),
    }
    assert needed(facts().settings) == ()
