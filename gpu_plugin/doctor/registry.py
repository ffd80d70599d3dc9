"""The checks by name, in the order in which one thing depends on another: of several failures the first is often the cause."""

from collections.abc import Callable, Mapping, Sequence

from gpu_plugin.doctor.checks.cdi_directory import cdi_directory
from gpu_plugin.doctor.checks.clock import clock
from gpu_plugin.doctor.checks.configuration import configuration
from gpu_plugin.doctor.checks.container_runtime import container_runtime
from gpu_plugin.doctor.checks.daemon import daemon
from gpu_plugin.doctor.checks.device_nodes import device_nodes
from gpu_plugin.doctor.checks.driver_library import driver_library
from gpu_plugin.doctor.checks.driver_versions import driver_versions
from gpu_plugin.doctor.checks.fabric_manager import fabric_manager
from gpu_plugin.doctor.checks.features_directory import features_directory
from gpu_plugin.doctor.checks.gpus import gpus
from gpu_plugin.doctor.checks.imex_channels import imex_channels
from gpu_plugin.doctor.checks.kubelet_directory import kubelet_directory
from gpu_plugin.doctor.checks.kubelet_socket import kubelet_socket
from gpu_plugin.doctor.checks.kubernetes_api import kubernetes_api
from gpu_plugin.doctor.checks.mps import mps
from gpu_plugin.doctor.checks.other_plugins import other_plugins
from gpu_plugin.doctor.checks.permissions import permissions
from gpu_plugin.doctor.checks.persistence_mode import persistence_mode
from gpu_plugin.doctor.checks.pod_resources import pod_resources
from gpu_plugin.doctor.checks.registration import registration
from gpu_plugin.doctor.checks.security_modules import security_modules
from gpu_plugin.doctor.checks.state_directory import state_directory
from gpu_plugin.doctor.facts import Facts
from gpu_plugin.doctor.finding import Finding, warning

Check = Callable[[Facts], Sequence[Finding]]

CHECKS: Mapping[str, Check] = {
    "configuration": configuration,
    "permissions": permissions,
    "security-modules": security_modules,
    "clock": clock,
    "driver-library": driver_library,
    "driver-versions": driver_versions,
    "gpus": gpus,
    "device-nodes": device_nodes,
    "persistence-mode": persistence_mode,
    "fabric-manager": fabric_manager,
    "imex-channels": imex_channels,
    "mps": mps,
    "state-directory": state_directory,
    "kubelet-directory": kubelet_directory,
    "kubelet-socket": kubelet_socket,
    "other-plugins": other_plugins,
    "pod-resources": pod_resources,
    "container-runtime": container_runtime,
    "cdi-directory": cdi_directory,
    "daemon": daemon,
    "registration": registration,
    "kubernetes-api": kubernetes_api,
    "features-directory": features_directory,
}


def examined(facts: Facts) -> list[tuple[str, Finding]]:
    """What every check finds, each with the check's name, in their order; at least one of each.

    A check that fails by itself, as over the status of a daemon of another version, is a finding and takes no other with it.
    """
    return [(name, finding) for name, check in CHECKS.items() for finding in _found(check, facts)]


def _found(check: Check, facts: Facts) -> Sequence[Finding]:
    try:
        return check(facts)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is said
        return [
            warning(
                f"this check failed on what it saw: {type(error).__name__}: {error}",
                "is the running daemon of another version? Use its own gpu-plugin; otherwise report this",
            )
        ]
