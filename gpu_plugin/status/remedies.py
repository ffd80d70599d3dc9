"""The remedy of each kind of problem, as steps with commands that work from the operator's shell. Pure.

The commands need kubectl. If this process is not a pod, they are plain commands for the node.
"""

import re
from collections.abc import Mapping

import msgspec

from gpu_plugin.health.explain import Explanation, Remedy
from gpu_plugin.health.latch import REBOOT, RESET
from gpu_plugin.health.notices import Notice
from gpu_plugin.health.signal import REPLACE
from gpu_plugin.status.model import Step

TO_DO = "; to do: "  # separates the problem and the remedy in a reason that other packages make


class Shell(msgspec.Struct, frozen=True):
    """The place of the daemon: the Node's name, and the namespace and name of its pod. All are empty outside a cluster."""

    node: str = ""
    namespace: str = ""
    pod: str = ""

    def command(self, words: str) -> str:
        """Return a command of gpu-plugin in the daemon's container."""
        return f"kubectl exec -n {self.namespace} {self.pod} -- {words}" if self.pod else words

    def spelled(self, command: str) -> str:
        """Return a command of the tables below as it works here."""
        in_pod, on_node = _PLACES.get(command, (command, command))
        command = in_pod if self.pod else on_node
        for word, name in (("NODE", self.node), ("NAMESPACE", self.namespace), ("POD", self.pod)):
            command = re.sub(rf"\b{word}\b", name, command)
        return self.command(command) if command.startswith("gpu-plugin") else command


# Commands that differ: in a pod, and on a node without a cluster.
_PLACES: Mapping[str, tuple[str, str]] = {
    "LOG": ("kubectl logs -n NAMESPACE POD", "journalctl -u gpu-plugin"),
    "RESTART": ("kubectl delete pod -n NAMESPACE POD", "systemctl restart gpu-plugin"),
}

DETAILS = Step("See all checks of the node", "gpu-plugin doctor")
LOG = Step("Read the daemon's log", "LOG")
RESTART = Step("Restart the plugin", "RESTART")

# The steps of each kind of problem of the node.
REMEDIES: Mapping[str, tuple[Step, ...]] = {
    "waiting": (Step("Wait for the other daemon to end, or end it: one daemon serves a node"), DETAILS),
    "no-configuration": (Step("Give the Node's label the name of a valid config file"), DETAILS),
    "driver": (DETAILS, Step("Look for the kernel's messages, on the node", "dmesg | grep -iE 'nvrm|xid'")),
    "driver-silent": (Step("Try the driver, on the node", "nvidia-smi"), DETAILS),
    "restart": (RESTART,),
    "not-registered": (DETAILS, Step("See whether the kubelet works, on the node", "systemctl status kubelet")),
    "missing-gpu": (
        Step("Look for its bus id in the kernel's messages, on the node", "dmesg | grep -iE 'nvrm|pci'"),
        Step("Reset the GPU, reboot the node, or have the GPU serviced"),
    ),
    "resource": (DETAILS,),
    "unoffered": (Step("Change the configuration, or the GPUs, so that they fit each other"), DETAILS),
    "state": (Step("Make sure that the state directory can be written and has free space"), DETAILS),
    "cdi": (DETAILS,),
    "cdi-file": (Step("See which files containers get, and which are left out", "gpu-plugin cdi list"),),
    "configuration": (Step("Correct the file, and check it before it is used", "gpu-plugin validate FILE"),),
    "without-effect": (Step("Remove the setting, or add the settings that it needs"),),
    "label": (DETAILS, LOG),
    "cluster": (DETAILS, LOG),
    "labels": (DETAILS, LOG),
    "no-gpu": (),
    "withheld": (DETAILS,),
}

KEEP_AWAY = Step("Keep new pods away from the node", "kubectl cordon NODE")
DRAIN = Step("Move its pods to other nodes", "kubectl drain NODE --ignore-daemonsets --delete-emptydir-data")
LET_BACK = Step("Let pods onto the node again", "kubectl uncordon NODE")


def of(kind: str, shell: Shell) -> tuple[Step, ...]:
    """Return the steps for a problem of the node. Steps that need a cluster are left out without one."""
    return _spelled(REMEDIES[kind], shell)


def of_signal(signal: Explanation, gpu: str, shell: Shell, *, released: bool) -> tuple[Step, ...]:
    """Return the steps that close an open signal of a GPU. `released` is whether the GPU is released for maintenance."""
    advice = (Step(signal.action[:1].upper() + signal.action[1:]),) if signal.action else ()
    match signal.remedy:
        case Remedy.RESET:
            steps = (KEEP_AWAY, DRAIN, *reset_steps(gpu, released=released, persistent=signal.persistent), LET_BACK)
        case Remedy.REBOOT:
            steps = (KEEP_AWAY, DRAIN, Step("Reboot the node, on the node", "systemctl reboot"), LET_BACK)
        case Remedy.REPLACE:
            steps = (KEEP_AWAY, DRAIN, Step("Have the GPU tested and replaced"))
        case Remedy.UNCORDON:
            return _spelled((Step("Lift the cordon once pods may have the GPU", f"gpu-plugin uncordon {gpu}"),), shell)
        case Remedy.RESUME:
            return _spelled((Step("Resume the GPU once the work on it is done", f"gpu-plugin resume {gpu}"),), shell)
        case _:
            return advice
    return _spelled((*(() if signal.action in _STEPS_SAY_IT else advice), *steps), shell)


def of_notice(notice: Notice, gpu: str, shell: Shell, *, released: bool) -> tuple[Step, ...]:
    """Return the steps for a notice about a GPU, and the command that takes it back."""
    advice = Step(notice.action[:1].upper() + notice.action[1:])
    reset = reset_steps(gpu, released=released, persistent=notice.persistent)
    steps = (KEEP_AWAY, DRAIN, *reset, LET_BACK) if notice.resets else ()
    undo = (Step("Or take the change back, on the node", notice.undo),) if notice.undo else ()
    return _spelled((advice, *steps, *undo), shell)


_STEPS_SAY_IT = frozenset({RESET, REBOOT, REPLACE})  # advice that the steps of its remedy have already


def reset_steps(gpu: str, *, released: bool, persistent: bool) -> tuple[Step, ...]:
    """Return the steps that reset a GPU, without its release if it is `released`. The driver resets no `persistent` GPU."""
    reset = f"nvidia-smi --gpu-reset -i {gpu}"
    if persistent:
        reset = f"nvidia-smi -i {gpu} -pm 0 && {reset} && nvidia-smi -i {gpu} -pm 1"
    release = Step("Release the GPU: the plugin closes it", f"gpu-plugin release {gpu}")
    return (
        *(() if released else (release,)),
        Step("Reset the GPU, on the node", reset),
        Step("Resume the GPU", f"gpu-plugin resume {gpu}"),
    )


def in_words(steps: tuple[Step, ...]) -> str:
    """Return steps as one text: the sentences, each with its command."""
    return "; ".join(step.text + (f": {step.command}" if step.command else "") for step in steps)


def _spelled(steps: tuple[Step, ...], shell: Shell) -> tuple[Step, ...]:
    return tuple(
        Step(step.text, shell.spelled(step.command))
        for step in steps
        if shell.node or not step.command.startswith("kubectl")
    )
