"""Properties of all checks, and cases that need more than a row of facts."""

from typing import cast

import pytest
from msgspec.structs import replace

from gpu_plugin.config.sharing import MPS, SharedResource
from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.doctor.checks import CHECKS, clock, examine, examined
from gpu_plugin.doctor.checks.kubernetes_api import needed_rights
from gpu_plugin.doctor.checks.mps import Mps
from gpu_plugin.doctor.daemon import Daemon
from gpu_plugin.doctor.driver import Driver, KernelModule
from gpu_plugin.doctor.finding import Unknown
from gpu_plugin.status.model import Missing, Status
from tests.unit.doctor.made_up import (
    FACTS,
    FAILED,
    GPU,
    HUNG,
    NOTE,
    OK,
    POD,
    SKIPPED,
    WARNING,
    driver,
    gpu,
    made_up,
    status,
)


@pytest.fixture(autouse=True)
def _synchronised(monkeypatch):
    monkeypatch.setattr(clock, "kernel_clock", lambda: (True, 0.02))


def shared_by_mps(**changed):
    node = made_up(**changed)
    node.settings = replace(node.settings, sharing=(SharedResource(GPU, GPU, 4, MPS),), mps_root="/run/nvidia/mps")
    return node


def test_a_node_that_is_well_has_nothing_wrong():
    assert {found.status for _, found in examined(made_up())} <= {OK, SKIPPED}


NO_LIBRARY = Driver(code=Return.LIBRARY_NOT_FOUND, trouble="dlopen: no libnvidia-ml.so.1")
NO_MODULE = Driver(code=Return.DRIVER_NOT_LOADED, trouble="nvmlInit_v2: Driver Not Loaded")
BARE = {"pci_gpus": {}, "module": KernelModule(False), "driver": NO_LIBRARY}
NOTHING_SERVED = Daemon(status(resources={}, gpus=()))
GUESTS = {"0000:10:00.0": "vfio-pci"}


@pytest.mark.parametrize(
    "differs",
    [
        {"daemon": Daemon(trouble="no daemon answers")},
        {"daemon": NOTHING_SERVED},
        {"daemon": NOTHING_SERVED, "driver": NO_MODULE},
        {"daemon": NOTHING_SERVED, "driver": driver(), "module": KernelModule(True, "580.95.05"), "pci_gpus": GUESTS},
        {"daemon": NOTHING_SERVED, "pci_gpus": GUESTS},
    ],
    ids=["no daemon", "daemon", "library", "driver of guests", "guests"],
)
def test_a_node_without_a_gpu_needs_no_driver(differs):
    found = examined(made_up(**BARE | differs))
    assert {each.status for _, each in found} <= {OK, NOTE, SKIPPED}, found
    assert [each for _, each in found if each.status is NOTE and "has no NVIDIA GPU" in each.found]


@pytest.mark.parametrize(
    "differs",
    [
        {"pci_gpus": {"0000:10:00.0": ""}},
        {"device_roots": {"/dev/dxg": ""}},
        {"pci_gpus": Unknown("no PCI bus")},
        {"module": Unknown("not to be seen")},
        {"module": KernelModule(True, "580.95.05")},
        {"daemon": Daemon(status(missing=(Missing(name="GPU 10:00.0", uuid="GPU-0", why="it is gone"),)))},
        {"driver": Driver(code=Return.UNKNOWN, trouble="nvmlInit_v2: Unknown Error")},
    ],
    ids=["on the bus", "WSL", "no bus", "module not seen", "module loaded", "had one", "another error"],
)
def test_a_driver_that_does_not_open_fails_where_there_may_be_a_gpu(differs):
    [found] = examine("driver-library", made_up(**BARE | differs))
    assert found.status is FAILED


@pytest.mark.parametrize("unknown", [HUNG, Unknown("not to be seen")], ids=["hung", "unseen"])
@pytest.mark.parametrize("options", [{}, {"simulate": "hgx-h100"}], ids=["real", "simulated"])
def test_no_fact_is_taken_for_granted(unknown, options):
    """A fact that cannot be seen fails nothing, and a fact that hangs is reported by at least one check."""
    options = {**options, "device_list_strategy": "cdi-cri", "node_labels": "file", "imex_channel_ids": "0"}
    options |= {"node_condition": True, "node_name": "n"}
    unused = {"configuration", "file", "pci_gpus", "switches", "cdi_conflicts", "majors", "fabric_manager", "released"}
    unused |= {"other_plugins", "imex_channels" if options.get("simulate") else "device_roots"}
    unused |= {"module"} if options.get("simulate") else set()
    for name in FACTS:
        found = examined(made_up(options=options, **{name: unknown}))
        failures = [each for _, each in found if each.status is FAILED]
        assert all(unknown.hung for _ in failures), (name, failures)
        if unknown.hung and name not in unused:
            assert [each for _, each in found if unknown.why in each.found], name
    everything = dict.fromkeys(set(FACTS) - {"configuration", "file"}, unknown)
    assert len(examined(made_up(options=options, **everything))) >= len(CHECKS)


def test_a_check_that_fails_takes_no_other_with_it():
    found = examined(made_up(daemon=Daemon(cast("Status", object()))))
    stands = {name: each for name, each in found if each.status is WARNING}
    assert set(stands) == {"daemon", "registration", "device-nodes"}  # these read the status
    assert "another version" in stands["daemon"].remedy
    assert len(found) == len(CHECKS)


def test_mps_that_is_wanted():
    up, down = {"/m/nvidia.com/gpu": True}, {"/m/nvidia.com/old": False}
    [missing] = examine("mps", shared_by_mps(mps=Mps(root="/m")))
    assert missing.status is WARNING
    assert "mps.enabled" in missing.remedy
    [well] = examine("mps", shared_by_mps(mps=Mps((), up, "/m"), driver=driver(gpu(0, compute_mode=3))))
    assert (well.status, well.found) == (OK, "1 MPS daemon below /m")
    [silent] = examine("mps", shared_by_mps(mps=Mps((), up | down, "/m")))
    assert silent.status is WARNING
    assert "/m/nvidia.com/old" in silent.found
    assert "/m/nvidia.com/gpu" not in silent.found
    [unseen] = examine("permissions", shared_by_mps(process=POD))
    assert (unseen.status, "hostPID" in unseen.found) == (NOTE, True)


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
    said = {str(right): (right.needed_by, right.name) for right in needed_rights(made_up(options=on).settings)}
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
    assert needed_rights(made_up().settings) == ()
