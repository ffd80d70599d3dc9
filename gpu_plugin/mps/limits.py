"""The limits that an MPS daemon sets for each client: the commands for them, and the daemon's answers. Pure.

The order of commands is the same as in NVIDIA's plugin v0.20.0 (cmd/mps-control-daemon/mps). Any client may change the limits:
the socket `control` is open to all users, and the daemon takes `set_default_...` commands from all of them (seen with driver
535).
"""

import re

import msgspec

from gpu_plugin.config.sharing import MpsLimits
from gpu_plugin.devices.node import Gpu

GET_THREADS = "get_default_active_thread_percentage"
"""The command that a working control daemon can always answer. NVIDIA's plugin sends the same."""

UNKNOWN = "Unknown command"  # the beginning of the answer to a command that the daemon does not know

# Commands to set and get the limit of a client's memory on a GPU (nvidia-cuda-mps-control(1))
_SET_MEMORY = "set_default_device_pinned_mem_limit"
_GET_MEMORY = "get_default_device_pinned_mem_limit"

_MIB = 1024 * 1024
_UNITS = {"M": 1, "G": 1024, "T": 1024 * 1024}  # MiB by the unit of an answer
_ROUNDING = 0.05  # answers have one digit after the decimal point


class DaemonLimits(msgspec.Struct, frozen=True):
    """The limits of one daemon: a client's percentage of a GPU's threads, and its MiB of memory by the GPU's ordinal.

    The ordinal of a GPU is its place in the daemon's CUDA_VISIBLE_DEVICES, not its NVML index: the daemon numbers only these
    devices, in this order, regardless of CUDA_DEVICE_ORDER. A GPU that does not report its memory may have no limit.
    """

    threads: float
    memory: tuple[tuple[int, int], ...] = ()

    @property
    def commands(self) -> tuple[str, ...]:
        """Commands that set the limits, to be sent before the daemon has clients.

        The limit of threads comes last: a daemon with this limit also has the others.
        """
        memory = (f"{_SET_MEMORY} {ordinal} {mebibytes}M" for ordinal, mebibytes in self.memory)
        return (*memory, f"set_default_active_thread_percentage {self.threads:g}")

    @property
    def questions(self) -> tuple[str, ...]:
        """Commands whose answers show the limits: of threads, then of memory for each device that has a limit."""
        return (GET_THREADS, *(f"{_GET_MEMORY} {ordinal}" for ordinal, _ in self.memory))

    def differences(self, answer: str) -> str:
        """Compare the answer to `questions` with these limits. Return a sentence, empty if the daemon has the limits.

        Memory is answered in whole units, rounded down, such as 79G for 81559M. So a change by less than one unit is not seen.
        A device without a limit has no answer. Daemons of drivers before R495 (CUDA 11.5) do not support memory limits.
        """
        threads = threads_in(answer)
        if threads is None or not same_threads(threads, self.threads):
            shown = f"{threads:.1f} %" if threads is not None else repr(answer or "nothing")
            return f"it gives each client {shown} of the threads, not {self.threads:g} %"
        if UNKNOWN in answer:
            return ""
        found = answer.split()[1:]
        if len(found) != len(self.memory):
            shown = " ".join(found) or "nothing"
            return f"it has not set or kept all of {len(self.memory)} memory limits: it answers {shown!r}"
        for (ordinal, mebibytes), answered in zip(self.memory, found, strict=True):
            if not _same_memory(mebibytes, answered):
                return f"it limits the memory of device {ordinal} to {answered}, not {mebibytes}M"
        return ""


def limits_of(gpus: tuple[Gpu, ...], replicas: int, configured: MpsLimits) -> DaemonLimits:
    """Return the limits of a daemon with these GPUs. Without a configured limit of memory it is the equal share, rounded down."""
    memory = []
    for ordinal, gpu in enumerate(gpus):
        share = configured.pinned_memory
        if share is None and gpu.memory_bytes:
            share = gpu.memory_bytes // replicas // _MIB
        if share is not None:
            memory.append((ordinal, share))
    return DaemonLimits(thread_percentage(replicas, configured), tuple(memory))


def thread_percentage(replicas: int, configured: MpsLimits) -> float:
    """Return the limit of a GPU's threads for each client, in percent.

    Without a configured limit it is the equal share, rounded down to a whole number, as in NVIDIA's plugin.
    """
    return 100 // replicas if configured.active_thread_percentage is None else configured.active_thread_percentage


def threads_in(answer: str) -> float | None:
    """Return the percentage of threads in a daemon's answer; None if the answer has no number."""
    found = re.search(r"\d+(\.\d+)?", answer)
    return float(found[0]) if found else None


def same_threads(one: float, other: float) -> bool:
    """Return whether two percentages are equal within the precision of an answer."""
    return abs(one - other) <= _ROUNDING + 1e-9


def _same_memory(mebibytes: int, answered: str) -> bool:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([MGT])B?", answered)
    return found is not None and abs(float(found[1]) * _UNITS[found[2]] - mebibytes) < _UNITS[found[2]]
