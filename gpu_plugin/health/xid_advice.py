"""Advice to operators about an Xid: NVIDIA's immediate action, and never less or more than what ends it."""

from collections.abc import Mapping

from gpu_plugin.health.latch import Proof, Verdict

RESET = "reset the GPU when no pod has it"
REBOOT = "drain the node and reboot it; where the GPU does not come back, have it serviced"
_LINKS = "look at its NVLinks (nvidia-smi nvlink --status -i {gpu}), reset all GPUs that they join"
_VENDOR = "have the GPU inspected by its vendor"
_LOG = "look at the kernel's log and at NVIDIA's catalogue of Xid errors"
_NOTHING = "nothing need be done"

_RECOVERIES: Mapping[Proof, Mapping[str, str]] = {
    Proof.RESET: {
        "CHECK_MECHANICALS": "check the GPU's power cables and seat, then reboot the node",
        "RESET_GPU": RESET,
        "RESTART_BM": REBOOT,
        "RESTART_VM": "restart the virtual machine, or reboot the node",
        "UPDATE_SWFW": "update the driver and the firmware, then reset the GPU",
        "WORKFLOW_NVLINK5_ERR": _LINKS,
        "WORKFLOW_NVLINK_ERR": _LINKS,
        "WORKFLOW_XID_48": RESET,
    },
    Proof.REBOOT: {
        "CHECK_MECHANICALS": "check the GPU's power cables and seat, then reboot the node",
        "RESTART_BM": REBOOT,
        "RESTART_VM": "restart the virtual machine, or reboot the node",
    },
}
"""The immediate actions of NVIDIA's catalogue that bring about a proof, in words in which `{gpu}` stands for the GPU."""

_PASSING: Mapping[str, str] = {
    "CHECK_UVM": "look at the kernel's log for what the unified memory driver says",
    "CONTACT_SUPPORT": f"where it comes again, {_VENDOR}",
    "RESTART_APP": "restart the application",
    "WORKFLOW_XID_45": "look for the error before it; where there is none, a process was killed, or restart the fabric manager",
    "XID_154": "do what the driver's recovery action asks for",
}
"""The actions about what ends by itself."""


def advised(action: str, verdict: Verdict, proof: Proof) -> str:
    """Advice on an Xid of this immediate action that means this verdict, where this proof ends it."""
    if proof is Proof.RMA:
        return _VENDOR
    if proof not in _RECOVERIES:
        return _PASSING.get(action, _LOG if verdict is Verdict.DEGRADED and not action else _NOTHING)
    if known := _RECOVERIES[proof].get(action):
        return known
    recovery = RESET if proof is Proof.RESET else REBOOT
    if action == "CONTACT_SUPPORT":
        return f"{recovery}; where it comes again, {_VENDOR}"
    if verdict is not Verdict.DEGRADED:
        return recovery
    if action == "IGNORE":
        return f"nothing at once: work goes on; {recovery}, which ends it"
    return f"{_LOG}; {recovery}"
