"""The cost of a start: modules for some nodes or commands are imported by these alone."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

LATER = {
    "elftools": "CDI specifications",
    "gpu_plugin.containers.cdi.build": "CDI specifications",
    "gpu_plugin.containers.cdi_files.keeper": "CDI specifications",
    "gpu_plugin.cluster.events": "Events of the Kubernetes API",
    "gpu_plugin.cluster.node_api": "the Kubernetes API",
    "gpu_plugin.cluster.node_metadata": "the Kubernetes API",
    "gpu_plugin.config.schema": "a config file",
    "gpu_plugin.doctor": "another command",
    "gpu_plugin.containers.driver_root": "CDI specifications",
    "gpu_plugin.cluster.labels.values": "labels of the Node",
    "gpu_plugin.status.model": "status, metrics and the status page",
    "gpu_plugin.status.problems": "status, metrics and the status page",
    "gpu_plugin.telemetry.listener.server": "--http-address",
    "gpu_plugin.health.explain": "another command",
    "gpu_plugin.mps": "devices shared by MPS",
    "gpu_plugin.nvml.driver": "the hardware of the node, once it is known which it is",
    "gpu_plugin.simulation": "--simulate",
    "gpu_plugin.kubelet._api.v1": "the first answer of PodResources",
    "gpu_plugin.telemetry.metrics": "whoever scrapes",
    "h11": "--http-address",
    "hashlib": "configuration from a label, simulated nodes",
    "httpx2": "the Kubernetes API",
    "lightkube": "the Kubernetes API",
    "pynvml": "the driver of a real node",
    "pythonjsonlogger": "--log-format json",
    "yaml": "a config file",
}
"""Modules that the daemon must not import before it knows that it needs them, and who does."""

PROGRAM = """
import json, sys
import gpu_plugin.cli, gpu_plugin.cli.run, gpu_plugin.cli.output, gpu_plugin.daemon.process
made = {
    f"{each.__module__}.{each.__qualname__}"
    for name, module in list(sys.modules.items()) if name.startswith("gpu_plugin")
    for each in vars(module).values()
    if isinstance(each, type) and each.__module__.startswith("gpu_plugin") and "__dataclass_params__" in vars(each)
    and not each.__module__.startswith("gpu_plugin.kubelet._api")
}
print(json.dumps({"modules": sorted(sys.modules), "dataclasses": sorted(made)}))
"""


DATACLASSES = {
    "gpu_plugin.health.policy.XidPolicy": "it keeps what it was asked (cached_property)",
    "gpu_plugin.placement.topology.Topology": "a field of it counts in no comparison",
}


@pytest.fixture(scope="module")
def start():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True, text=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", sorted(LATER))
def test_the_daemon_imports_what_few_need_only_for_those(start, module):
    there = [name for name in start["modules"] if name == module or name.startswith(f"{module}.")]
    assert not there, f"this is for: {LATER[module]}"


def test_what_is_not_to_be_imported_exists():
    """A renamed module would always be missing at the start."""
    ours = [name for name in LATER if name.startswith("gpu_plugin.")]
    assert all(find_spec(name) is not None for name in ours), ours


def test_value_types_of_the_daemon_are_structs(start):
    """A dataclass takes 0.35 ms of the start and 6 KiB, a msgspec struct next to nothing."""
    assert set(start["dataclasses"]) <= set(DATACLASSES), "make it a msgspec.Struct"


@pytest.mark.parametrize("module", ["yaml", "hashlib"])
def test_a_built_in_simulated_node_is_read_without_libraries_of_files(module):
    program = f"import sys; from gpu_plugin.simulation.profile import load; load('hgx-h100'); sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
