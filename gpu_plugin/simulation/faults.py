"""The faults of `gpu-plugin fault` for a simulated node. A new fault needs a function and a line in `FAULTS`."""

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.devices.gpu_names import called
from gpu_plugin.devices.node import Gpu
from gpu_plugin.devices.nvml_h import ALL_INSTANCES, EventType, RecoveryAction, Return
from gpu_plugin.health.xid_table import XID_TABLE
from gpu_plugin.simulation import device_nodes
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.part_faults import MASK, PART_FAULTS, Fault, change, flag, require, whole

_NONE = "none"
_EMPTY = "empty"
"""Values of `mig` other than profiles: no MIG mode, and MIG mode without a MIG device (as with an empty text)."""

HIGHEST_XID = 999
"""Xids are numbered consecutively; the numbers in NVIDIA's catalog are below 200."""

_LONGEST_HANG = 86400.0
"""Seconds: a day."""

_MANY_TIMES = 1000
"""Largest number of refusals; more than any test needs."""

_RECOVERIES = {"reset": int(RecoveryAction.GPU_RESET), "reboot": int(RecoveryAction.NODE_REBOOT)}
"""nvmlDeviceGpuRecoveryAction_t that a driver requests after a fatal Xid, by the Xid's way of recovery."""


def _xid(node: SimulatedNode, gpu: int, number: int, instance: object = None) -> str:
    gpu_instance, compute_instance = (ALL_INSTANCES, ALL_INSTANCES) if instance is None else _instances(instance)
    # An Xid of an instance only ends the work in the instance, so the driver requests no action for the whole GPU.
    action = _recovery_after(number) if instance is None else 0
    receivers = node.raise_xid(gpu, number, action, gpu_instance=gpu_instance, compute_instance=compute_instance)
    where = "" if instance is None else f" on instance {instance}"
    return f"Xid {number} raised{where}" + ("" if receivers else ", and nothing listens for its events")


def _recovery_after(xid: int) -> int:
    """Return the action that a driver requests after this Xid: for a fatal Xid its recovery, else 0.

    For Xids whose severity the driver decides (109, 144 to 146), the simulated driver requests no action. `--recovery-action`
    changes that.
    """
    row = XID_TABLE.get(xid)
    return _RECOVERIES.get(row.recovery, 0) if row is not None and row.verdict == "fatal" else 0


def _event(node: SimulatedNode, gpu: int, kind: int) -> str:
    if kind & EventType.XID_CRITICAL:
        raise ConfigError(f"event: {kind:#x}: {int(EventType.XID_CRITICAL):#x} is an Xid: ask for xid")
    unknown = kind & ~(node.profile.gpus[gpu].event_types or 0)
    require(node, gpu, "event", not unknown, f"sends no events of type {unknown:#x}")
    receivers = node.post(gpu, kind)
    return f"event of type {kind:#x} sent" + ("" if receivers else ", and nothing listens for it")


def _vanish(node: SimulatedNode, gpu: int, _: object) -> str:
    node.vanish(gpu)
    return "gone from its driver, until it returns or is healed"


def _return(node: SimulatedNode, gpu: int, _: object) -> str:
    if not node.condition(gpu).vanished:
        raise ConfigError(f"return: GPU {gpu} has not vanished")
    node.bring_back(gpu)
    return "back, for whoever opens the driver from now on"


def _hang(node: SimulatedNode, gpu: int, seconds: float) -> str:
    node.hang(gpu, seconds)
    return f"every driver call hangs for {seconds:g} s"


def _seconds(name: str, value: object) -> float:
    """Read a number of seconds up to a day."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name}: {value!r} is not a number of seconds")
    if not 0 < value <= _LONGEST_HANG:  # false for NaN too
        raise ConfigError(f"{name}: {value}: from above 0 to {_LONGEST_HANG:g} seconds")
    return float(value)


def _error(node: SimulatedNode, gpu: int, code: int) -> str:
    node.change(gpu, error=code or None)
    return f"every driver call fails with {code}, until healed" if code else "driver calls do not fail"


def _profiles(name: str, value: object) -> list[str] | None:
    """Read a list of MIG profiles; None outside MIG mode."""
    if not isinstance(value, str):
        raise ConfigError(
            f"{name}: {value!r} is not a list of MIG profiles such as 3g.20gb,3g.20gb, nor {_EMPTY} nor {_NONE}"
        )
    if value.strip() == _NONE:
        return None
    return [part.strip() for part in value.split(",")] if value.strip() not in ("", _EMPTY) else []


def _mig(node: SimulatedNode, gpu: int, profiles: list[str] | None) -> str:
    try:
        node.partition(gpu, profiles)
    except ConfigError as error:
        raise ConfigError(f"mig: {error}") from None
    device_nodes.remake(node)
    node.post(gpu, EventType.MIG_CONFIG_CHANGE, 0)
    return (
        "out of MIG mode" if profiles is None else f"in MIG mode, partitioned into {', '.join(profiles) or 'nothing'}"
    )


def _reset(node: SimulatedNode, gpu: int, _: object) -> str:
    node.reset(gpu)
    off = node.condition(gpu)
    return "reset" + (", and still off the bus" if off.lost or off.vanished else "")


def _reset_keeping_energy(node: SimulatedNode, gpu: int, _: object) -> str:
    node.reset(gpu, energy=False)
    return "reset, and its energy counts on, as where the driver stays loaded"


def _heal(node: SimulatedNode, gpu: int, _: object) -> str:
    node.heal(gpu)
    return "repaired and reset"


def _reboot(node: SimulatedNode, value: object) -> str:
    flag("reboot", value)
    node.reboot()
    return f"rebooted, with boot id {node.boot_id}"


def _init_error(node: SimulatedNode, value: object, times: object = None) -> str:
    code = whole(1, Return.UNKNOWN)("init-error", value)
    many = math.inf if times is None else whole(1, _MANY_TIMES)(TIMES, times)
    node.refuse("open", code, times=many)
    often = "until the daemon ends" if times is None else "once" if many == 1 else f"{many} times"
    return f"its driver refuses to be opened with {code}, {often}"


FAULTS: Mapping[str, Fault] = {
    "xid": Fault(whole(1, HIGHEST_XID), _xid),
    "event": Fault(whole(1, MASK), _event),
    **PART_FAULTS,
    "lost": Fault(flag, change("fell off the bus, until healed", lost=True)),
    "vanish": Fault(flag, _vanish),
    "return": Fault(flag, _return),
    "hang": Fault(_seconds, _hang),
    "slow": Fault(_seconds, change("every driver call takes {:g} s, until healed", "slow")),
    "error": Fault(whole(Return.SUCCESS, Return.UNKNOWN), _error),
    "mig": Fault(_profiles, _mig),
    "reset": Fault(flag, _reset),
    "reset-keeping-energy": Fault(flag, _reset_keeping_energy),
    "heal": Fault(flag, _heal),
}
"""Faults of a GPU by key, which is also the flag of `gpu-plugin fault`."""

NODE_FAULTS: Mapping[str, Callable[[SimulatedNode, object], str]] = {"reboot": _reboot, "init-error": _init_error}
"""Faults of the whole node by key. They need no GPU."""

INSTANCE = "instance"
"""The key for the instance of an Xid, such as 1 or 1/0. Without it, the Xid is of the whole GPU."""

TIMES = "times"
"""The key for the number of refusals to open the driver. Without it, they last while the daemon runs."""


def apply(node: SimulatedNode, request: Mapping[str, object]) -> str:
    """Apply a fault such as `{"gpu": 3, "xid": 79}` and return a sentence about it. `gpu` is an index or a uuid.

    The request is checked first. Driver threads see the fault before the node's state is on disk. The state is on disk when
    this returns, so it may block for as long as the disk does.

    Raises:
        ConfigError: there is no such GPU, not exactly one fault, or an invalid value.
    """
    known = (*FAULTS, *NODE_FAULTS)
    if unknown := set(request) - {*known, INSTANCE, TIMES, "gpu"}:
        raise ConfigError(f"{', '.join(sorted(unknown))}: no such fault; there are {', '.join(known)}")
    asked = [name for name in known if name in request]
    if len(asked) != 1:
        raise ConfigError(f"one fault at a time, of {', '.join(known)}: {' and '.join(asked) or 'none'} given")
    (name,) = asked
    if INSTANCE in request and name != "xid":
        raise ConfigError(f"{INSTANCE}: goes only with xid, not with {name}")
    if TIMES in request and name != "init-error":
        raise ConfigError(f"{TIMES}: goes only with init-error, not with {name}")
    if name in NODE_FAULTS:
        if "gpu" in request:
            _find_gpu(node, request["gpu"])
        of_node = partial(_init_error, times=request[TIMES]) if TIMES in request else NODE_FAULTS[name]
        return f"The node: {of_node(node, request[name])}."
    gpu = _find_gpu(node, request.get("gpu"))
    fault = FAULTS[name]
    if INSTANCE in request:
        fault = Fault(fault.read, partial(_xid, instance=request[INSTANCE]))
    there = node.profile.gpus[gpu]
    named = called(Gpu(there.uuid, gpu, pci_bus_id=there.pci_bus_id))
    return f"{named}: {fault.apply(node, gpu, name, request[name])}."


def _instances(value: object) -> tuple[int, int]:
    """Read a GPU instance and a compute instance such as 1/0. A text such as 1 means the whole GPU instance."""
    if isinstance(value, str):
        numbers = value.split("/")
        if len(numbers) <= 2 and all(part.isascii() and part.isdecimal() and len(part) <= 2 for part in numbers):
            return int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else ALL_INSTANCES
    raise ConfigError(f"instance: {value!r}: a GPU instance such as 1, or a compute instance of it such as 1/0")


def _find_gpu(node: SimulatedNode, value: object) -> int:
    """Return the index of the GPU with this index or uuid."""
    gpus = node.profile.gpus
    if isinstance(value, int) and not isinstance(value, bool):
        if 0 <= value < len(gpus):
            return value
        raise ConfigError(
            f"GPU {value}: this node has {f'GPUs 0 to {len(gpus) - 1}' if len(gpus) > 1 else 'only GPU 0'}"
        )
    for index, gpu in enumerate(gpus):
        if gpu.uuid == value:
            return index
    if isinstance(value, str):
        raise ConfigError(f"GPU {value}: no GPU of this node has this name; give an index from 0 to {len(gpus) - 1}")
    raise ConfigError("gpu: missing: which GPU, by index or uuid")


def verb(node: SimulatedNode) -> Callable[[Mapping[str, object]], Awaitable[Mapping[str, object]]]:
    """Return `apply` as a verb of the daemon's control socket: it gets a request and returns `{"done": sentence, "at": time}`.

    `at` is the time of the fault in seconds of this machine's monotonic clock, for measurements.
    """

    async def fault(request: Mapping[str, object]) -> Mapping[str, object]:
        from anyio import to_thread  # noqa: PLC0415 - reading a profile needs no event loop

        return await to_thread.run_sync(_timed, node, request)

    return fault


def _timed(node: SimulatedNode, request: Mapping[str, object]) -> Mapping[str, object]:
    at = time.monotonic()
    return {"done": apply(node, request), "at": at}
